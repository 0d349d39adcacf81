"""Stands in for Slurm's commands in tests: it runs the scripts that it is given as processes of this machine.

One file under the names sbatch, squeue, scancel, scontrol, sinfo and srun; what it knows lies in the folder $STAND_IN.
It does what the engine relies on: arrays, `--output`, signals to the script alone or to all of a job, queueing again.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(os.environ["STAND_IN"])


def main():
    name, words = Path(sys.argv[0]).name, sys.argv[1:]
    if (ROOT / "hangs").exists():
        time.sleep(600)
    commands = (sbatch, squeue, scancel, scontrol, sinfo, srun)
    {command.__name__: command for command in commands}[name](words)


def sbatch(words):
    options = dict(word.removeprefix("--").partition("=")[::2] for word in words[:-1])
    if "bad" in options.get("account", ""):
        sys.exit("sbatch: error: Batch job submission failed: Invalid account")
    job = len(list(ROOT.glob("job-*"))) + 1
    (ROOT / f"job-{job}").write_text(json.dumps(words))
    indices = [*elements_of(options["array"])] if "array" in options else [None]
    for index in indices:
        element = f"{job}" if index is None else f"{job}_{index}"
        script = ROOT / f"{element}.sh"
        script.write_bytes(Path(words[-1]).read_bytes())
        put(element, state="PENDING", pid=0, job=job, index=index)
        number = job if index == indices[-1] else job * 10000 + index  # as with Slurm, one element has the array's own
        if os.fork() == 0:
            os.setsid()
            with open(os.devnull, "r+b") as nothing:
                for fd in (0, 1, 2):
                    os.dup2(nothing.fileno(), fd)
            os._exit(lives(element, script, options, number))
    print(job)


def elements_of(text):
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def lives(element, script, options, number):
    """One job until it has ended for good."""
    me = get(element)
    index = me["index"]
    output = options["output"].replace("%a", str(index)).replace("%%", "%")
    count = 0
    while True:
        own = {"SLURM_JOB_ID": str(number), "SLURM_RESTART_COUNT": str(count), "SLURM_JOB_NODELIST": "here"}
        if index is not None:
            own |= {"SLURM_ARRAY_JOB_ID": str(me["job"]), "SLURM_ARRAY_TASK_ID": str(index)}
        with open(output, "ab") as log:
            process = subprocess.Popen(
                ["bash", str(script)], cwd=options["chdir"], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=os.environ | own, start_new_session=True,
            )  # fmt: skip
        put(element, state="RUNNING", pid=process.pid)
        code = process.wait()
        again = ROOT / f"{element}.again"
        if not again.exists():
            break
        again.unlink()
        count += 1
        put(element, state="PENDING")
    if get(element)["state"] != "CANCELLED":
        put(element, state="FAILED" if code else "COMPLETED")
    return 0


def squeue(words):
    for element, me in everything():
        index = "N/A" if me["index"] is None else me["index"]
        print(f"{element}|{me['job']}|{index}|{me['state']}|{'here' if me['state'] == 'RUNNING' else ''}|None")


def scancel(words):
    chosen = [word for word in words if not word.startswith("--")]
    for element, me in everything():
        if element not in chosen and str(me["job"]) not in chosen:
            continue
        if "--state=PENDING" in words and me["state"] != "PENDING":
            continue
        if "--batch" in words:
            assert "--signal=TERM" in words
            if me["state"] == "RUNNING":
                os.kill(me["pid"], signal.SIGTERM)
        elif me["state"] in ("RUNNING", "PENDING"):
            put(element, state="CANCELLED")
            if me["pid"]:
                os.killpg(me["pid"], signal.SIGTERM)


def scontrol(words):
    words = [word for word in words if word != "--oneliner"]
    if words[:2] == ["show", "config"]:
        print("MaxArraySize            = 101")
    elif words[:2] == ["show", "job"]:
        print(*(f"JobState={me['state']}" for element, me in everything() if words[2] in (element, str(me["job"]))))
    elif words[0] == "requeue":
        for element, me in everything():
            if words[1] in (element, str(me["job"])):
                (ROOT / f"{element}.again").touch()
    else:
        sys.exit(f"scontrol: {words}")


def sinfo(words):
    print((ROOT / "sinfo").read_text(), end="")


def srun(words):
    """Every machine is this one."""
    options = [word for word in words if word.startswith("--")][:3]
    count = int(options[0].removeprefix("--ntasks="))
    tasks = [
        subprocess.Popen(words[len(options) :], env=os.environ | {"SLURM_NODEID": str(node), "SLURM_PROCID": str(node)})
        for node in range(count)
    ]
    sys.exit(max(task.wait() for task in tasks))


def everything():
    return sorted((path.stem, json.loads(path.read_text())) for path in ROOT.glob("*.state"))


def get(element):
    return json.loads((ROOT / f"{element}.state").read_text())


def put(element, **values):
    path = ROOT / f"{element}.state"
    before = json.loads(path.read_text()) if path.exists() else {}
    path.with_suffix(".tmp").write_text(json.dumps(before | values))
    path.with_suffix(".tmp").replace(path)


main()
