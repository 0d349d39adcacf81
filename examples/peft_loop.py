"""LoRA with PEFT: learners train an adapter together, each beside the same frozen base. The four lines are marked +.

python examples/peft_loop.py                                   # alone: the four lines do nothing

python examples/peft_loop.py --genesis genesis.safetensors     # write the adapter's first values, once
skerry syncer --run runs/peft --genesis genesis.safetensors --run.steps 300 --run.learners 2 &
SKERRY_SYNCER=localhost:7077 SKERRY_NAME=a python examples/peft_loop.py &
SKERRY_SYNCER=localhost:7077 SKERRY_NAME=b python examples/peft_loop.py
skerry export runs/peft --adapter adapter                      # as PeftModel.from_pretrained loads it
"""

import os
import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import skerry  # +

LENGTH = 32


def adapted() -> PeftModel:
    """The base, the same for every learner (yours comes from from_pretrained), with an adapter that is trained."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **shape))
    return get_peft_model(base, LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj", "v_proj", "lm_head"]))


def main() -> None:
    torch.set_num_threads(1)  # so small a model gains nothing from more
    files, model = sorted(Path(os.__file__).parent.glob("*.py"))[:40], adapted()
    if "--genesis" in sys.argv:
        skerry.save_genesis(model, sys.argv[sys.argv.index("--genesis") + 1])
        return
    text = torch.tensor(list(b"".join(file.read_bytes() for file in files)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)

    with skerry.Learner(model, optimizer) as learner:  # +
        torch.seed()  # every learner draws its own batches
        for step in range(300):
            windows = text[torch.randint(len(text) - LENGTH, (16, 1)) + torch.arange(LENGTH)]
            loss = model(input_ids=windows, labels=windows).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 50 == 0:
                print(f"step {step:4d}  loss {loss.item():.3f}")
            if not learner.step(tokens=windows.numel()):  # + False once the run has had enough
                break  # +


if __name__ == "__main__":
    main()
