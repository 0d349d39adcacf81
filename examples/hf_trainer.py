"""A Hugging Face Trainer, and the two lines (marked +) that make it a learner of a shared run.

python examples/hf_trainer.py                                   # alone: the two lines do nothing

python examples/hf_trainer.py --genesis genesis.safetensors     # write the first values, once
skerry syncer --run runs/hf --genesis genesis.safetensors --run.steps 300 --run.learners 2 &
SKERRY_SYNCER=localhost:7077 SKERRY_NAME=a python examples/hf_trainer.py &
SKERRY_SYNCER=localhost:7077 SKERRY_NAME=b python examples/hf_trainer.py

Started again after a kill, it goes on with the Trainer's last checkpoint: optimizer, schedule, place in the data.
"""

import os
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import skerry  # +

LENGTH = 32


def windows() -> list[dict[str, torch.Tensor]]:
    """Bytes to learn from: the standard library's files beside this interpreter's `os` module."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:40]
    text = torch.tensor(list(b"".join(file.read_bytes() for file in files)))
    return [{"input_ids": window, "labels": window} for window in text.split(LENGTH)[:-1]]


def small() -> LlamaForCausalLM:
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **shape))


def main() -> None:
    torch.set_num_threads(1)  # so small a model gains nothing from more
    model = small()
    if "--genesis" in sys.argv:
        skerry.save_genesis(model, sys.argv[sys.argv.index("--genesis") + 1])
        return
    args = TrainingArguments(
        output_dir=f"checkpoints-{os.environ.get('SKERRY_NAME', 'alone')}",
        max_steps=300,  # at most; a run may have had enough before
        lr_scheduler_type="cosine",  # over the whole run, not over this learner's steps
        seed=int.from_bytes(os.urandom(4)),  # every learner draws its own batches
        **{"learning_rate": 3e-3, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2},
        **{"logging_steps": 25, "save_steps": 50, "report_to": "none"},
    )
    trainer = Trainer(model, args, train_dataset=windows(), callbacks=[skerry.hf.Callback()])  # +
    has_checkpoint = os.path.isdir(args.output_dir) and get_last_checkpoint(args.output_dir) is not None
    trainer.train(resume_from_checkpoint=has_checkpoint)


if __name__ == "__main__":
    main()
