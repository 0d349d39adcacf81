"""The whole configuration of a run: one frozen struct a table, presets as functions, one `validate`.

The syncer is the only source of configuration: it stores the resolved config on the tape and hands it to every
learner that joins. Unknown keys are refused with their path. Nothing deeper in reads the environment. A file may also
have a table [plan], what `skerry plan run` asks of links and failures, and tables that say what `skerry launch` starts,
and where (`engines/spec.py`): no run reads them.
"""

from __future__ import annotations

import datetime
import difflib
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

from skerry.errors import ConfigError, LocalError
from skerry.text import near

PLAN = "plan"
LAUNCH = ("syncer", "islands", "ray", "slurm", "kubernetes")
Codec = Literal["fp32", "bf16", "int8", "int4", "int2"]
FILE_BYTES_MAX = 1 << 20
LEVELS_MAX = 32  # of tables and lists in a file; the deepest that anybody reads has five
BITS_MAX = 64  # of a whole number in a file, as TOML has it


class Run(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is trained and until when: exactly one of the three budgets is set."""

    name: str = "skerry"  # what people call it
    seed: int = 0  # of the built-in model and the order of its data
    learners: int = 4  # how many are expected (M); there is room for half as many more, and for 4 more at least
    tokens: int = 0  # of all learners together, those that are not discarded
    steps: int = 0  # inner steps per learner, on average over `learners`; like tokens, those that are not discarded
    minutes: float = 0.0  # in which a syncer serves it
    evaluate_every: float = 0.0  # share of the budget from one evaluation beside the run to the next; 0: none
    gather_s: float = 0.0  # the first step is taken when all `learners` are there, or none has come for so long


class Model(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The built-in GPT; a number above zero overrides the preset's. A learner with its own model ignores this."""

    preset: str = "1m"  # tiny, 1m, 3m, 10m, 100m, 300m or 1b
    layers: int = 0  # blocks of attention and MLP
    width: int = 0  # of the residual stream
    heads: int = 0  # of attention
    context: int = 0  # tokens that the model sees at once
    vocabulary: int = 0  # 0: the pack's, or the 256 values of a byte


class Data(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the built-in trainer reads."""

    path: str = "stdlib"  # a text file, a folder of them, a pack, or this machine's Python standard library
    batch: int = 4  # sequences in a step of one learner
    bytes_max: int = 64 << 20  # of text
    held_out_batches: int = 16  # of text that nobody trains on, by which the model is judged


class Pack(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The pack of a run, filled in from `data.path` when it begins; that of every built-in learner must be the same."""

    dtype: str = ""  # of its tokens on the disk
    vocabulary: int = 0  # kinds of tokens
    tokenizer: str = ""  # that made them
    tokens: int = 0  # in all its shards
    digest: str = ""  # of its index; none: no pack, or none where the run was begun


class Sync(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When fragments are synchronised, and who must be in."""

    num_fragments: int = 0  # P; 0: by the model's size, 24, or 12 or 6 of a small one
    cut_tensors: bool = True  # so that fragments are even; else there are never more of them than tensors
    sync_every: int = 24  # H, in inner steps
    fragment_sync_delay: int = 2  # tau, in inner steps
    quorum: int | float = 0.5  # K: a number of learners, or a share of the ready ones
    grace: float = 0.8  # gamma, the share of the measured slack that may be waited
    policy: Literal["auto", "fixed"] = "auto"  # auto: merges are a plain mean in a warm and in a cool phase
    warm_every: int = 4  # H in the warm phase
    warm_steps: int = 500  # how long it lasts, in inner steps a learner; counted as the versions they make at that H
    warm_share: float = 0.2  # and how long at most, of the budget
    cool_share: float = 0.1  # of the budget, at its end
    stale_versions_max: int = 16  # who is further behind goes on from the newest version and gives up its drift
    stall_s: float = 20.0  # a connected learner that takes no step for this long does not count for the quorum
    close_timeout_s: float = 30.0  # how long the last work of learners is waited for at the end


class Merge(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How contributions become one delta."""

    rule: Literal["rda", "mean", "consensus"] = "rda"  # embeddings are always averaged
    threads: int = 4  # of the syncer: look at contributions, merge, hash, write; no more than it has cores


class Outer(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The outer optimizer, for which a merged delta is a gradient."""

    rule: Literal["nesterov", "sgd", "delayed"] = "nesterov"  # how a merged delta moves the model
    lr: float = 0.4  # eta
    momentum: float = 0.85  # mu
    delay: int = 4  # versions of a fragment from one momentum step to the next, for "delayed"
    restart: int = 0  # versions of a fragment after which its velocity is forgotten; 0 never


class Wire(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What travels, and how long silence is borne."""

    codec_up: Codec = "int4"  # of what learners send
    codec_down: Codec = "int4"  # of what they are sent
    heartbeat_s: float = 1.0  # how often a silent connection says that it lives
    timeout_s: float = 10.0  # after which one that says nothing is given up
    held_bytes_max: int = 4 << 30  # of contributions that wait at the syncer for their merge
    streams: int = 4  # bulk connections of a learner: one alone does not fill a long link
    mbit_max_up: float = 0.0  # payloads of one learner to the syncer, Mbit/s at most; 0 is no bound
    mbit_max_down: float = 0.0  # of the syncer to one learner


class Store(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is kept on the disk."""

    deltas_kept: int = 4  # newest deltas per fragment kept in memory for learners a few versions behind
    segment_bytes: int = 8 << 20  # after which the tape goes on in another file
    checkpoint_every: int = 16  # versions of a fragment from one whole file of it to the next; between them, a journal
    keep_every: float = 0.25  # keep a whole version for good: below 1 a share of the budget, else versions; 0: none
    record: Literal["decisions", "full"] = "decisions"  # full: also every merged contribution's bytes, for replay


class Learner(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The inner loop of the built-in trainer, how a learner takes a new version in, and what it keeps for itself.

    `precision`, `compile` and `micro_batch` say how a step is computed, not what: islands differ, so `skerry learner`
    takes each as an option of its own, and these are for those that are not told otherwise.

    `adopt` says what becomes of the steps since the last contribution when a version comes. rebase: they stay, on top
    of it. overwrite: they are given up and booked so, and θ is the version, without a residual (alpha = 0 in the paper,
    fragment_update_alpha in torchft). blend: they stay pending, and `adopt_alpha` of what they changed stays in θ.
    """

    lr: float = 1e-3  # of AdamW, at its highest
    weight_decay: float = 0.1  # of AdamW, for matrices
    clip: float = 1.0  # the norm to which a longer gradient is shortened; 0: never
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # of matrix products; auto: bf16 on a GPU that has it
    compile: Literal["off", "default", "reduce-overhead"] = "off"  # torch.compile's mode
    micro_batch: int = 0  # sequences of a batch that are computed at once, their gradients added up; 0: all
    step_s: float = 0.0  # pad each step to this many seconds / speed; 0 runs free
    join_warmup: int = 10  # steps over which the inner rate is ramped after joining
    residual: Literal["theta", "buffer"] = "buffer"  # where what a codec left unsaid is kept
    adopt: Literal["rebase", "overwrite", "blend"] = "rebase"  # see above
    adopt_alpha: float = 0.5  # blend alone
    leave_timeout_s: float = 5.0  # how long a learner that leaves waits for its last work to be merged
    alone_steps_max: int = 300  # without a syncer; of a longer stretch no step spends any of the budget; 0: all do


class Config(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    pack: Pack = Pack()
    sync: Sync = Sync()
    merge: Merge = Merge()
    outer: Outer = Outer()
    wire: Wire = Wire()
    store: Store = Store()
    learner: Learner = Learner()


def default() -> Config:
    """The recommended defaults: a warm and a cool phase, RDA, Nesterov (0.4, 0.85), int4 both ways."""
    return Config()


def local() -> Config:
    """Learners that share a small machine: paced, so that figures speak of the protocol, not of the scheduler."""
    return Config(run=Run(learners=4), sync=Sync(num_fragments=24), learner=Learner(step_s=0.3))


def paper() -> Config:
    """The paper's setting, as near as Skerry comes to it: M = 8, P = H = 24, tau = 2, K = 1 with grace, H fixed, RDA,
    whole tensors, a version overwrites what a learner holds (alpha = 0), 16 bits each way.

    What differs: the outer step (0.7, 0.9) is that of the paper's predecessors and gamma is ours, for it publishes
    neither; a contribution is measured from its learner's own base, and counts in part if it spans several versions and
    more than H steps (the gain); a run ends with a plain mean of what is left; who comes back starts a fresh optimizer.
    """
    return Config(
        run=Run(learners=8),
        sync=Sync(num_fragments=24, cut_tensors=False, quorum=1, policy="fixed"),
        outer=Outer(lr=0.7, momentum=0.9),
        wire=Wire(codec_up="bf16", codec_down="bf16"),
        learner=Learner(adopt="overwrite"),
    )


PRESETS: dict[str, Callable[[], Config]] = {"default": default, "local": local, "paper": paper}


def resolve(base: Config, file: Path | None = None, overrides: Iterable[tuple[str, Any]] = ()) -> Config:
    """A preset, then a TOML file, then dotted overrides; checked once, here."""
    tables: dict[str, Any] = msgspec.to_builtins(base)
    if file is not None:
        _overlay(tables, _read_config(file), str(file), aside=(PLAN, *LAUNCH))
        _converted(tables, f"{file}: ")
    for key, value in overrides:
        *path, last = key.split(".")
        if len(path) != 1:
            raise ConfigError(f"{key[:80]!r}: name a table and a key, like sync.quorum")
        _overlay(tables, {path[0]: {last: value}}, "command line")
    return _converted(tables)


def said(base: Config, file: Path | None = None, overrides: Iterable[tuple[str, Any]] = ()) -> list[str]:
    """The keys that a preset, a file and overrides speak of, dotted; a key left to its default is not among them."""
    defaults = msgspec.to_builtins(Config())
    tables = {name: table.items() - defaults[name].items() for name, table in msgspec.to_builtins(base).items()}
    keys = [f"{name}.{key}" for name, items in tables.items() for key, _ in sorted(items)]
    if file is not None:
        spoken = {name: table for name, table in _read_config(file).items() if name not in (PLAN, *LAUNCH)}
        keys += [f"{name}.{key}" for name, table in spoken.items() for key in table]
    return list(dict.fromkeys([*keys, *(key for key, _ in overrides)]))


def differences(given: Config, recorded: Config, keys: Iterable[str]) -> list[str]:
    """Where two configurations differ in these keys: the key, the value given and the value recorded."""
    pairs = [(key, _value(given, key), _value(recorded, key)) for key in keys]
    return [f"{key} = {_in_toml(ours)} (the run has {_in_toml(its)})" for key, ours, its in pairs if ours != its]


# What an order may change while a run goes on: keys that the syncer alone reads, and looks at whenever it decides.
CHANGEABLE = (
    "sync.sync_every",
    "sync.quorum",
    "sync.grace",
    "sync.stall_s",
    "sync.cool_share",
    "outer.lr",
    "outer.momentum",
    "store.checkpoint_every",
    "store.keep_every",
)
_EXTENDED = "the budget is changed with skerry extend"
_STARTED = "it was read when the run began, and is of no use later"
_TRAINED = "learners have built their model and chosen their data by it"
_LEARNERS = "learners were told it when they joined, and would go by different values"
_SHAPED = "the fragments of this run are made by it"
_WARM = "the warm stage is counted by it, and would begin or end in retrospect"
_VELOCITY = "what the outer step has gathered so far means something else under another"
_MEMORY = "the syncer has laid out its memory, threads or sockets by it: the run keeps it for good"
# The others may not, each with the reason why: by table, or by key.
UNCHANGEABLE = {
    "run.name": "it is the run's name on its tape",
    "run.seed": _STARTED,
    "run.learners": "places, the warm stage and a budget in steps are counted by it",
    "run.tokens": _EXTENDED,
    "run.steps": _EXTENDED,
    "run.minutes": _EXTENDED,
    "run.evaluate_every": "the process beside the run that evaluates has read it",
    "run.gather_s": _STARTED,
    "model": _TRAINED,
    "data": _TRAINED,
    "pack": _TRAINED,
    "sync.num_fragments": _SHAPED,
    "sync.cut_tensors": _SHAPED,
    "sync.fragment_sync_delay": "it has to fit sync.sync_every, and nothing but the grace window follows from it",
    "sync.policy": _WARM,
    "sync.warm_every": _WARM,
    "sync.warm_steps": _WARM,
    "sync.warm_share": _WARM,
    "sync.stale_versions_max": _LEARNERS,
    "sync.close_timeout_s": _LEARNERS,
    "merge.rule": _VELOCITY,
    "merge.threads": _MEMORY,
    "outer.rule": _VELOCITY,
    "outer.delay": _VELOCITY,
    "outer.restart": _VELOCITY,
    "wire": _LEARNERS,
    "wire.held_bytes_max": _MEMORY,
    "store.deltas_kept": _MEMORY,
    "store.segment_bytes": _MEMORY,
    "store.record": "replay would find contributions of one part of the run alone",
    "learner": _LEARNERS,
}


def changed(config: Config, settings: Iterable[tuple[str, Any]]) -> Config:
    """With these keys set, as an order has them: refused unless each may change, and the whole can run."""
    given = list(settings)
    for key, _ in given:
        if key not in _keys():
            raise ConfigError(f"unknown key {key[:80]}: {_OWN.get(key) or meant(key)}")
    after = resolve(config, overrides=given)
    for key, _ in given:
        if key not in CHANGEABLE:
            reason = UNCHANGEABLE.get(key) or UNCHANGEABLE[key.partition(".")[0]]
            raise ConfigError(f"{key} cannot be changed while a run goes on: {reason}")
    return validate_change(config, after)


def meant(key: str) -> str:
    """The whole name of the key that was probably meant, one that may change before others; else those that may."""
    names = {name.partition(".")[2]: name for name in reversed([*CHANGEABLE, *_keys()])}  # the first has the last word
    last = key.rpartition(".")[2]
    close = [last] if last in names else difflib.get_close_matches(last, names, 1)
    return f"did you mean {names[close[0]]}?" if close else f"what may change is {', '.join(CHANGEABLE)}"


def _keys() -> list[str]:
    """All there are, dotted."""
    return [f"{name}.{key}" for name, table in msgspec.to_builtins(Config()).items() for key in table]


def validate_change(before: Config, after: Config) -> Config:
    """Refuse what cannot run, but for what the run has lived with so far: it is no fault of the change."""
    known = set(_problems(before))
    for problem in _problems(after):
        if problem not in known:
            raise ConfigError(problem)
    return after


def changes(before: Config, after: Config) -> list[tuple[str, Any, Any]]:
    """Every key in which two configurations differ, with its two values."""
    tables = [(name, getattr(before, name), getattr(after, name)) for name in before.__struct_fields__]
    pairs = [
        (f"{name}.{key}", getattr(was, key), getattr(now, key))
        for name, was, now in tables
        if was != now
        for key in was.__struct_fields__
    ]
    return [(key, was, now) for key, was, now in pairs if was != now]


def _value(config: Config, path: str) -> Any:
    table, key = path.split(".")
    return getattr(getattr(config, table), key)


def _converted(tables: dict[str, Any], where: str = "") -> Config:
    try:
        return msgspec.convert(tables, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(where + explained(error, Config, tables)) from None


def plan_table(file: Path, known: Collection[str]) -> dict[str, Any]:
    """[plan] of a file that `resolve` has read before: the keys that the plan knows, nothing else."""
    table: dict[str, Any] = _read_config(file).get(PLAN, {})
    for key in table:
        if key not in known:
            raise ConfigError(f"{file}: unknown key {PLAN}.{key}: {near(key, known)}")
    return table


def most(path: str) -> float:
    """The highest value that `validate` lets a key have."""
    return next(high for key, _, high in _RANGES if key == path)


def _read_config(file: Path) -> dict[str, Any]:
    return read_toml(file, ConfigError, "given to --config")


def read_toml(file: Path, refusal: type[LocalError], which: str) -> dict[str, Any]:
    """The tables of a file, or of a pipe; `which` says whose path to check if it cannot be read."""
    try:
        with open(file, "rb") as source:
            data = source.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise refusal(f"{file}: is longer than {FILE_BYTES_MAX} bytes: check the path {which}")
        tables = tomllib.loads(data.decode("utf-8"))
    except OSError as error:
        raise refusal(f"{file}: cannot be read ({error.strerror}): check the path {which}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise refusal(f"{file}: is not valid TOML: {error}") from None
    except ValueError:  # Python reads no whole number of more than 4300 digits
        raise refusal(f"{file}: has a number of thousands of digits: write a shorter one") from None
    except RecursionError:
        raise refusal(f"{file}: {_TOO_DEEP}") from None
    for problem in _unfit(tables):
        raise refusal(f"{file}: {problem}")
    return tables


_TOO_DEEP = f"has tables or lists more than {LEVELS_MAX} deep in each other: no key takes such, take them out"


def _unfit(tables: dict[str, Any]) -> Iterable[str]:
    """What no reader could go down to, or say again: a dotted name nests without end, and a hexadecimal number is read
    at any length and written at none."""
    level: list[tuple[str, Any]] = [*tables.items()]
    for _ in range(LEVELS_MAX):
        deeper: list[tuple[str, Any]] = []
        for where, value in level:
            if isinstance(value, int) and value.bit_length() > BITS_MAX:
                yield f"{where:.80}: has a number of more than {BITS_MAX} bits: write a smaller one"
            elif isinstance(value, dict):
                deeper += ((f"{where:.80}.{key:.80}", inner) for key, inner in value.items())
            elif isinstance(value, list):
                deeper += ((f"{where:.80}[{at}]", inner) for at, inner in enumerate(value))
        level = deeper
    if level:
        yield _TOO_DEEP


def _overlay(tables: dict[str, Any], changes: dict[str, Any], where: str, aside: Sequence[str] = ()) -> None:
    """Tables named in `aside` may be there and stay unread."""
    for table, values in changes.items():
        if table not in tables and table not in aside:
            raise ConfigError(f"{where}: unknown table [{table}]: {near(table, [*tables, *aside])}")
        if table in LAUNCH and table in aside:
            continue
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: {table} is a table, write [{table}] and keys below it")
        if table in aside:
            continue
        for key, value in values.items():
            if key not in tables[table]:
                way = _OWN.get(f"{table}.{key}") or near(key, tables[table])
                raise ConfigError(f"{where}: unknown key {table}.{key}: {way}")
            is_count = isinstance(tables[table][key], int) and isinstance(value, float) and value.is_integer()
            tables[table][key] = int(value) if is_count else value  # 1e9 tokens is a number of tokens


_OWN = {
    f"learner.{key}": f"it is each learner's own: give --{key} to skerry learner, or set SKERRY_{key.upper()}, which "
    "the learners of skerry train read too"
    for key in ("node", "state")
}


def explained(error: msgspec.ValidationError, kind: type[Struct], table: dict[str, Any]) -> str:
    """Why this table is none of its kind: the key, its value and what it may be."""
    text, _, path = str(error).partition(" - at `$.")
    value: Any = table
    known: Any = kind
    keys = re.findall(r"[a-z_][a-z_0-9]*", path)
    for key in keys:
        value, known = value[key], get_type_hints(known)[key]
    if strange := re.match(r"Object contains unknown field `(.*)`", text):
        return f"{'.'.join([*keys, strange[1]])}: unknown key: {near(strange[1], known.__struct_fields__)}"
    said = "" if isinstance(value, dict) else f" = {_in_toml(value)}"  # a whole table says nothing
    is_choice = get_origin(known) is Literal and isinstance(value, str)
    return f"{'.'.join(keys)}{said}: {near(value, get_args(known)) if is_choice else _in_words(text)}"


def _in_toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, datetime.date | datetime.time) else repr(value)


_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text in quotes",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}


def _in_words(text: str) -> str:
    """msgspec's "Expected `int | float`, got `bool`" for somebody who writes TOML."""
    if kinds := re.match(r"Expected `([a-z| ]+)`", text):
        return "write " + " or ".join(_KINDS[kind] for kind in kinds[1].replace("int | float", "float").split(" | "))
    return text[0].lower() + text[1:]


def validate(config: Config) -> Config:
    """Refuse what cannot run, naming the key, the value and the way out."""
    for problem in _problems(config):
        raise ConfigError(problem)
    return config


def _problems(c: Config) -> Iterable[str]:
    budgets = [f"run.{k}" for k in ("tokens", "steps", "minutes") if getattr(c.run, k)]
    if len(budgets) != 1:
        said = " and ".join(budgets) or "none"
        yield (
            f"run: exactly one of run.tokens, run.steps and run.minutes is the budget, {said} set; "
            "give one, like --run.tokens 1e9"
        )
    yield from _out_of_range(c)
    k = c.sync.quorum
    if (isinstance(k, int) and k < 1) or (isinstance(k, float) and not 0 < k < 1):
        yield f"sync.quorum = {k}: a number of learners from 1, or a share between 0 and 1 like 0.5"
    if isinstance(k, int) and k > c.run.learners:
        yield (
            f"sync.quorum = {k}: more than the {c.run.learners} learners that are expected (run.learners): no merge "
            f"would happen with all of them; {c.run.learners} is the most here, and more take a run begun for more"
        )
    if c.sync.fragment_sync_delay > c.sync.sync_every:
        yield (
            f"sync.fragment_sync_delay = {c.sync.fragment_sync_delay}: longer than sync.sync_every = "
            f"{c.sync.sync_every}; a sync must fit between two of a fragment"
        )
    if c.wire.timeout_s < 2 * c.wire.heartbeat_s:
        yield (
            f"wire.timeout_s = {c.wire.timeout_s:g}: must be at least {2 * c.wire.heartbeat_s:g}, twice "
            f"wire.heartbeat_s = {c.wire.heartbeat_s:g}, or one heartbeat that comes late would cut a healthy link"
        )
    if 0 < c.run.evaluate_every < SHARE_MIN:
        yield f"run.evaluate_every = {c.run.evaluate_every:g}: a share of the budget from {SHARE_MIN:g}, or 0 for never"
    for key in ("mbit_max_up", "mbit_max_down"):
        if 0 < (mbit := getattr(c.wire, key)) < MBIT_MIN:
            yield f"wire.{key} = {mbit:g}: from {MBIT_MIN:g} Mbit/s, or 0 for no bound"
    every = c.store.keep_every
    if 0 < every < SHARE_MIN or (every > 1 and not float(every).is_integer()):
        yield (
            f"store.keep_every = {every:g}: a share of the budget from {SHARE_MIN:g} and below 1, a whole number "
            "of versions of the slowest fragment, or 0 for none"
        )
    if c.sync.warm_share + c.sync.cool_share > 1:
        yield f"sync.warm_share + sync.cool_share = {c.sync.warm_share + c.sync.cool_share:g}: more than the whole run"
    yield from _nameless(c)


def _out_of_range(c: Config, but: tuple[str, ...] = ()) -> Iterable[str]:
    for path, low, high in _RANGES:
        value = _value(c, path)
        if not low <= value <= high and not path.startswith(but):
            yield f"{path} = {value}: must be from {low} to {high}"


def _nameless(c: Config) -> Iterable[str]:
    if not c.run.name or any(ch not in _NAME for ch in c.run.name) or len(c.run.name) > 64:
        yield f"run.name = {c.run.name!r}: use 1 to 64 of a-z, 0-9, '.', '_' and '-'"


_NAME = frozenset("abcdefghijklmnopqrstuvwxyz0123456789._-")
_MANY = 10**18
SHARE_MIN = 0.001  # of the budget, from one kept version or evaluation to the next
MBIT_MIN = 0.01  # a bound that lets next to nothing through is a slip
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("run.learners", 1, 4096),
    ("run.tokens", 0, _MANY),
    ("run.steps", 0, _MANY),
    ("run.minutes", 0, 10**7),
    ("run.seed", 0, 2**32 - 1),
    ("run.evaluate_every", 0, 1),
    ("run.gather_s", 0, 10**6),
    ("model.layers", 0, 1000),
    ("model.width", 0, 10**5),
    ("model.heads", 0, 1000),
    ("model.context", 0, 10**6),
    ("model.vocabulary", 0, 10**7),
    ("pack.vocabulary", 0, 2**32),
    ("pack.tokens", 0, _MANY),
    ("data.batch", 1, 10**6),
    ("data.bytes_max", 1, _MANY),
    ("data.held_out_batches", 1, 10**5),
    ("sync.num_fragments", 0, 10**4),
    ("sync.sync_every", 1, 10**6),
    ("sync.fragment_sync_delay", 1, 10**6),
    ("sync.grace", 0, 1),
    ("sync.warm_share", 0, 1),
    ("sync.warm_every", 1, 10**6),
    ("sync.warm_steps", 0, 10**9),
    ("sync.cool_share", 0, 1),
    ("sync.stale_versions_max", 1, 10**9),
    ("sync.stall_s", 0.1, 10**6),
    ("sync.close_timeout_s", 0.1, 10**6),
    ("merge.threads", 1, 256),
    ("outer.lr", 1e-6, 10),
    ("outer.momentum", 0, 0.999999),
    ("outer.delay", 1, 1000),
    ("outer.restart", 0, 10**6),
    ("wire.heartbeat_s", 0.05, 3600),
    ("wire.timeout_s", 0.1, 3600),
    ("wire.held_bytes_max", 1 << 20, _MANY),
    ("wire.streams", 1, 64),
    ("wire.mbit_max_up", 0, 10**6),
    ("wire.mbit_max_down", 0, 10**6),
    ("store.deltas_kept", 0, 1000),
    ("store.segment_bytes", 1 << 16, 1 << 30),
    ("store.checkpoint_every", 1, 1000),
    ("store.keep_every", 0, 10**9),
    ("learner.lr", 1e-9, 10),
    ("learner.weight_decay", 0, 10),
    ("learner.clip", 0, 10**6),
    ("learner.micro_batch", 0, 10**6),
    ("learner.step_s", 0, 3600),
    ("learner.join_warmup", 0, 10**6),
    ("learner.leave_timeout_s", 0, 3600),
    ("learner.adopt_alpha", 0, 1),
    ("learner.alone_steps_max", 0, 10**9),
)


def encode(config: Config) -> bytes:
    return msgspec.json.encode(config)


def offered(data: bytes) -> Config:
    """What a syncer hands out, which need not mean well: `ConfigError` unless a learner can live with it.

    Each number is within its bounds, but for those that only a syncer reads.
    """
    try:
        config = decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, TypeError) as error:
        raise ConfigError(f"a configuration that cannot be read: {error}") from None
    for problem in (*_out_of_range(config, _SYNCERS), *_nameless(config)):
        raise ConfigError(problem)
    return config


_SYNCERS = ("store.", "merge.", "wire.held_bytes_max")


_BEFORE: dict[str, dict[str, Any]] = {"learner": {"alone_steps_max": 0}}


def decode(data: bytes) -> Config:
    """A run's configuration as it is stored: without a key it does what runs did before there was one (`_BEFORE`)."""
    tables = msgspec.json.decode(data, type=dict[str, dict[str, Any]])
    return msgspec.convert(tables | {name: keys | tables.get(name, {}) for name, keys in _BEFORE.items()}, Config)
