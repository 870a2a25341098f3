"""Bad values and bad config files: one line with the key or file, before any process starts."""

import os
import re

import pytest

from megastep.config import Config, checks, value_of
from megastep.config.schema import settings, written
from tests.bad_input.harness import CONFIG, rejected

TYPES = {written(key): found.type for key, found in settings().items()}
FLOATS = [key for key, kind in TYPES.items() if kind is float]
INTS = [key for key, kind in TYPES.items() if kind in (int, int | None)]
TEXTS = [key for key, kind in TYPES.items() if kind in (str, str | None)]
CHOICES = [
    key
    for key in TEXTS
    if key
    not in (
        "model.path",
        "data.train",
        "data.eval",
        "warm_start.data",
        "loss.teacher",
        "env.name",
        "agent.function",
        "agent.tool_parser",
        "agent.reasoning_parser",
        "agent.host",
        "cluster.address",
        "run.dir",
        "run.name",
        "run.resume",
        "run.wandb_project",
        "run.wandb_entity",
        "run.wandb_id",
    )
]


# ---------------------------------------------------------------- values


def rejected_by_key(keys: list[str], value: str) -> dict[str, str]:
    """The line of each key, if all of them have this value."""
    lines = rejected("train", CONFIG, *(f"{key}={value}" for key in keys))
    by_key = {key: [line for line in lines if line.startswith(f"error: {key} = ")] for key in keys}
    assert {key: len(found) for key, found in by_key.items()} == dict.fromkeys(keys, 1)
    return {key: found[0] for key, found in by_key.items()}


@pytest.mark.parametrize("key", FLOATS)
def test_c2_every_float_must_be_finite(key):
    """C2: `optimizer.lr=inf` made every weight non-finite, and ended with 0."""
    (line,) = rejected(
        "train", CONFIG, f"{key}=.nan", names=f"{key} = nan: must be a finite number"
    )


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan", "1e400", "inf", "nan"])
def test_c2_all_floats_must_be_finite(value):
    for line in rejected_by_key(FLOATS, value).values():
        assert line.endswith(": must be a finite number")


def test_c2_all_floats_have_a_largest_value():
    for line in rejected_by_key(FLOATS, "1e300").values():
        assert re.search(r"= 1e\+300: must be .*(or less|1\)?)$", line), line


@pytest.mark.parametrize("key", INTS)
def test_c7_every_int_has_a_largest_value(key):
    lines = rejected(
        "train",
        CONFIG,
        f"{key}=18446744073709551615",
        names=f"{key} = 18446744073709551615: must be ",
    )
    assert sum(line.startswith(f"error: {key} = ") for line in lines) == 1


@pytest.mark.parametrize("value", ["-9223372036854775808", "-1"])
def test_c7_all_ints_have_a_smallest_value(value):
    lines = rejected("train", CONFIG, *(f"{key}={value}" for key in INTS))
    for key in INTS:
        assert any(line.startswith(f"error: {key} = {value}: ") for line in lines), key


@pytest.mark.parametrize("value", ["1.5", "true", "[1]", "x", "{a: 1}", "2024-01-01"])
def test_ints_are_ints(value):
    assert all(": wrong type, int" in line for line in rejected_by_key(INTS, value).values())


@pytest.mark.parametrize("key", TEXTS)
def test_c7_no_text_is_interpolated(key):
    (line,) = rejected(
        "train",
        CONFIG,
        f"{key}=${{oc.env:HOME}}",
        names=f"{key} = ${{oc.env:HOME}}: ${{...}} is not",
    )
    assert line.endswith("write the value itself")


@pytest.mark.parametrize(
    "value", ["${model.path}", "a${b}c", "${env:HOME}", "'${'", "'${}'", "${a:${b}}"]
)
def test_c7_nothing_is_interpolated(value):
    lines = rejected_by_key(TEXTS + INTS + FLOATS, value).values()
    assert all("${...} is not replaced here; write the value itself" in line for line in lines)


@pytest.mark.parametrize("value", ['"a\\0b"', '"a\\nb"', '"\\ud800"', '"\\x1b[31m"', "x" * 5000])
def test_texts_are_printable(value):
    assert all(line.isprintable() for line in rejected_by_key(TEXTS, value).values())


@pytest.mark.parametrize("key", CHOICES)
def test_choices(key):
    rejected("train", CONFIG, f"{key}=Other", names=f"{key} = Other: must be one of ")


@pytest.mark.parametrize(
    "override, line",
    [
        ("optimizer.eps=-1", "optimizer.eps = -1.0: must be more than 0"),
        ("optimizer.eps=0", "optimizer.eps = 0.0: must be more than 0"),
        ("optimizer.eps=2", "optimizer.eps = 2.0: must be 1 or less"),
        ("optimizer.lr=1.5", "optimizer.lr = 1.5: must be 1 or less"),
        ("optimizer.betas=[.nan,0.9]", "optimizer.betas = [nan, 0.9]: must be a finite number"),
        ("optimizer.betas=[0.9,1]", "must be two numbers of [0, 1)"),
        ("optimizer.betas={a: 1}", "optimizer.betas = {'a': 1}: wrong type"),
        ("optimizer.betas=[null,null]", "optimizer.betas = [None, None]: wrong type"),
        ("optimizer.clip_grad=-1", "optimizer.clip_grad = -1.0: must not be negative"),
        ("train.seed=-1", "train.seed = -1: must not be negative"),
        ("train.seed=2147483648", "train.seed = 2147483648: must be 2147483647 or less"),
        ("train.seed=0xffffffffffffffffffffffffffffffff", "beyond 64 bits"),
        (f"train.seed={'9' * 5000}", "train.seed = 999"),
        (f"train.seed=0x{'f' * 5000}", "train.seed = 0xfff"),
        (
            "train.steps=2024-13-45",
            "train.steps = 2024-13-45: not readable as YAML: month must be in 1..12",
        ),
        (
            "train.steps=2024-01-01",
            "train.steps = datetime.date(2024, 1, 1): wrong type, int is needed",
        ),
        ("train.steps=!!int ''", "train.steps = !!int '': not readable as YAML"),
        ("train.steps=!!bool perhaps", "not readable as YAML"),
        ("train.steps=!!timestamp soon", "not readable as YAML"),
        (
            "train.steps=!!python/object/apply:os.system [true]",
            "not readable as YAML: could not determine a constructor",
        ),
        ("train.steps=[", "train.steps = [: not readable as YAML"),
        (f"train.steps={'[' * 5000}", "not readable as YAML: nested too deeply"),
        ("train.steps={a: 1, a: 2}", "a is given twice, in lines 1 and 1"),
        ("train.steps=null", "train.steps = None: wrong type, int is needed"),
        ("train.steps=", "train.steps = None: wrong type, int is needed"),
        (
            "cluster.object_store_mb=1",
            "cluster.object_store_mb = 1: must be 75 or more: Ray starts with no less",
        ),
        ("cluster.object_store_mb=10000000", "MB of memory"),
        ("engine.cpu_kv_gb=60000", "GB of memory"),
        ("cluster.cpus_per_process=0.00001", "Ray counts in steps of 0.0001"),
        ("cluster.cpus_per_process=0", "cluster.cpus_per_process = 0.0: must be more than 0"),
        ("sync.backend=nccl", "sync.backend = nccl: there is no GPU here; use shm, or auto"),
        ("sync.backend=ipc", "sync.backend = ipc: there is no GPU here; use shm, or auto"),
        ("rollout.temperature=1e-5", "must be 0 (greedy), or 0.01 or more"),
        ("eval.temperature=0.001", "eval.temperature = 0.001: must be 0 (greedy)"),
        ("rollout.temperature=101", "rollout.temperature = 101.0: must be 100 or less"),
        ("policy.ranks=1000000", "policy.ranks = 1000000: must be 16384 or less"),
        (
            "data.generated_rows=100000000",
            "data.generated_rows = 100000000: must be 1000000 or less",
        ),
        ("policy.recompute=full", "policy.recompute = 'full': wrong type, list[str] is needed"),
        ("policy.recompute=[[full]]", "policy.recompute = [['full']]: wrong type"),
        ("policy.parallel.layers_per_stage=[]", "needs pipeline × virtual = 1 numbers"),
        ("policy.parallel.layers_per_stage=['${x}']", "${...} is not replaced here"),
        ("policy.parallel.layers_per_stage=[-1,3]", "each stage needs a layer"),
        ("model.path=", "model.path = None: wrong type"),
        ("model.path=''", "model.path = '': must not be empty"),
        ("model.path=???", "model.path: must be given"),
        ("model.path=/dev/null", "/dev/null: no such folder"),
        (f"model.path={'a/' * 2000}", "no such folder"),
        (f"model.path={'a' * 300}", "no such folder"),
        ("run.dir=' '", "run.dir = ' ': must not be empty"),
        ("data.shuffle=perhaps", "data.shuffle = 'perhaps': wrong type, bool is needed"),
        ("env=chase", "env: is a section; give one of its keys: env.name, env.options"),
        ("=1", "=1: not of the form key=value"),
        ("train.steps", "train.steps: not of the form key=value"),
        ("", "not of the form key=value"),
        (".=1", "unknown key"),
        ("train.=1", "unknown key"),
        ("train..steps=1", "unknown key; did you mean train.steps?"),
        ("train[steps]=1", "unknown key"),
        ("TRAIN.STEPS=1", "unknown key"),
        (f"{'x' * 100_000}=1", "unknown key"),
        ("a\nb=1", "'a\\nb': unknown key"),
        ("base=x.yaml", "base: unknown key"),
        ("async=1", "is a section"),
        ("env.options=5", "env.options = 5: wrong type, dict[str, Any] is needed"),
        ("env.options=null", "env.options = None: wrong type"),
        ("env.options=[1]", "env.options = [1]: wrong type"),
        ("env.options.=1", "env.options.: not a key; env.options.NAME is needed"),
        ("env.options.a..b=1", "env.options.a..b: not a key"),
        ("env.options={1: 2}", "env.options: 1 is not a name"),
        ("env.options={null: 2}", "env.options: None is not a name"),
        ("env.options.day=2024-01-01", "env.options.day = datetime.date(2024, 1, 1): must be text"),
        ("env.options.bytes=!!binary aGVsbG8=", "env.options.bytes = b'hello': must be text"),
        ("env.options.all=!!set {a, b}", "must be text"),
        ("env.options.key=Bearer ${env:NOT_SET}", "the environment variable NOT_SET is not set"),
        ("env.options.key=${oc.env:KEY}", "${env:NAME} reads an environment variable"),
        ("env.options.deep={a: [{b: '${c}'}]}", "${...} is not replaced here"),
        ("rollout.template.x=${env:KEY}", "${...} is not replaced here; write the value itself"),
        ("rollout.template=x", "rollout.template = 'x': wrong type"),
    ],
)
def test_c7_values(override, line):
    rejected("train", CONFIG, override, names=line)


@pytest.mark.parametrize(
    "name",
    [
        "../../evil",
        "/tmp/evil",
        "a/b",
        "..",
        ".",
        "''",
        "' '",
        "'a '",
        "a/",
        "./a",
        "a\\\\b",
        '"a\\0b"',
        '"a\\nb"',
        '"\\t"',
        "é" * 101,
        "x" * 201,
        '"\\ud800"',
        "~/../x",
        '"\\u202e"',
        "//",
    ],
)
def test_c6_a_run_name_is_the_name_of_one_folder(name, tmp_path):
    """C6: `run.name=../../evil` wrote outside run.dir."""
    rejected("train", CONFIG, f"run.name={name}", f"run.dir={tmp_path}/runs", names="run.name = ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "address",
    [
        "foo",
        "'foo:'",
        ":6379",
        "foo:bar",
        "foo:0",
        "foo:65536",
        "foo:99999",
        "foo:-1",
        "10.0.0.7:6379:1",
        "a b:6379",
        "http://head:8265",
        "ray://head:10001",
        "ray://",
        "redis://head:6379",
        "foo:6379/",
        "foo:６３７９",
        "''",
        "a/b:80",
    ],
)
def test_c7_an_address_is_a_host_and_a_port(address):
    """C7: `cluster.address=foo` was a traceback of Ray."""
    (line,) = rejected("train", CONFIG, f"cluster.address={address}", names="cluster.address = ")
    assert "HOST:PORT" in line or "port must be from 1 to 65535" in line


def test_several_errors_are_several_lines():
    lines = rejected(
        "train", CONFIG, "optimizer.lr=inf", "train.steps=x", "run.name=..", "cluster.address=foo"
    )
    assert len(lines) == 4 and [line.split()[1] for line in lines] == [
        "train.steps",
        "optimizer.lr",
        "run.name",
        "cluster.address",
    ]


@pytest.mark.parametrize(
    "argument", ["--gpu-gib=1e308", "--trajectory-tokens=" + "9" * 400, "--gpu-gib=" + "x" * 5000]
)
def test_c17_arguments_of_plan_have_a_largest_value(argument):
    rejected("plan", CONFIG, argument, names=argument.partition("=")[0])


# ---------------------------------------------------------------- files

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi")
)
MERGE_BOMB = "a: &a {x: 1}\n" + "".join(
    f"{new}: &{new}\n  <<: [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi")
)


@pytest.mark.parametrize(
    "content, line",
    [
        (
            "train:\n  steps: 1\n  steps: 2\n",
            "train.steps is given twice, in lines 2 and 3; keep one of them",
        ),
        (
            "train: {steps: 1}\nenv: {name: chase}\ntrain: {seed: 1}\n",
            "train is given twice, in lines 1 and 3",
        ),
        ("train: {steps: 1}\ntrain.steps: 2\n", "train.steps is given twice, in lines 1 and 2"),
        (
            "env:\n  options:\n    a: {b: 1,\n        b: 1}\n",
            "env.options.a.b is given twice, in lines 3 and 4",
        ),
        (
            "env: {options: {a: [{b: 1, b: 2}]}}\n",
            "env.options.a.0.b is given twice, in lines 1 and 1",
        ),
        ("base: a.yaml\nbase: b.yaml\n", "base is given twice, in lines 1 and 2"),
        (
            "model: {path: x}\n---\nmodel: {path: y}\n",
            "not readable as YAML: expected a single document",
        ),
        (BOMB, "aliases expand to more than 10000 values"),
        (MERGE_BOMB, "aliases expand to more than 10000 values"),
        ("a: &a [*a]\n", "line 1: an anchor that holds an alias of itself"),
        ("a: &a {b: *a}\n", "line 1: an anchor that holds an alias of itself"),
        ("a: *b\n", "not readable as YAML: found undefined alias"),
        ("- 1\n" * 20_000, "holds more than 10000 values"),
        ("a: [" + "1, " * 20_000 + "1]\n", "holds more than 10000 values"),
        ("a: " + "[" * 50_000, "not readable as YAML: nested too deeply"),
        ("a: " + "{a: " * 5000, "not readable as YAML: nested too deeply"),
        ("".join(" " * i + "a:\n" for i in range(600)), "not readable as YAML: nested too deeply"),
        ("a: " + "x" * (1 << 20), "larger than 1 MiB"),
        ("a: [1\n", "not readable as YAML: while parsing"),
        ("a: b: c\n", "not readable as YAML: mapping values are not allowed here"),
        ("\ta: 1\n", "not readable as YAML"),
        ("a: 'x\n", "not readable as YAML"),
        ("%YAML 9.9\n---\na: 1\n", "not readable as YAML"),
        (
            "a: !!python/object/apply:os.system [true]\n",
            "not readable as YAML: could not determine a constructor",
        ),
        ("a: !unknown 1\n", "not readable as YAML"),
        ("? [1, 2]\n: 3\n", "not readable as YAML: while constructing a mapping"),
        ("? {a: 1}\n: 3\n", "not readable as YAML: while constructing a mapping"),
        ("<<: 1\n", "not readable as YAML"),
        ("a: 0x" + "f" * 100 + "\n", "line 1: a whole number beyond 64 bits"),
        ("a: " + "9" * 5000 + "\n", "not readable as YAML: Exceeds the limit"),
        ("a: 2024-99-99\n", "not readable as YAML: month must be in 1..12"),
        ("42\n", "holds a int; `key: value` lines are needed"),
        ("- 1\n", "holds a list"),
        ("text\n", "holds a str"),
        ("{}\n", "model.path: must be given"),
        ("", "model.path: must be given"),
        ("# nothing\n", "model.path: must be given"),
        ("null\n", "model.path: must be given"),
        ("train:\n", "train: is a section; give one of its keys"),
        ("train: 5\n", "train: is a section"),
        ("train: [steps]\n", "train: is a section"),
        ("train: {stepz: 1}\n", "train.stepz: unknown key; did you mean train.steps?"),
        ("1: 2\n", "1: unknown key"),
        ("on: 2\n", "True: unknown key"),
        ("null: 2\n", "None: unknown key"),
        ("'': 2\n", "unknown key"),
        ("'a\\nb': 2\n", "unknown key"),
        ('"a\\nb": 2\n', "'a\\nb': unknown key"),
        ("base: 5\n", "base = 5: must be the path of another config"),
        ("base: [a.yaml]\n", "must be the path of another config"),
        ('base: "a\\0b"\n', "must be the path of another config"),
        ("base: nowhere.yaml\n", "nowhere.yaml: cannot be read (No such file or directory)"),
        ("base: .\n", "not a file; a YAML file is needed"),
        ("base: /dev/zero\n", "/dev/zero: not a file"),
        ("base: bad.yaml\n", "bad.yaml: base: leads back to the file itself"),
        (f"base: {'a' * 300}.yaml\n", "cannot be read (File name too long)"),
        (
            "optimizer: {lr: .inf}\nmodel: {path: x}\n",
            "optimizer.lr = inf: must be a finite number",
        ),
        (
            "run: {name: ../x}\nmodel: {path: x}\n",
            "run.name = '../x': must be the name of one folder",
        ),
        ("env: {options: {k: '${x}'}}\n", "env.options = ${x}: ${...} is not replaced here"),
        ("env: {options: {2024-01-01: 1}}\n", "is not a name"),
    ],
)
def test_c4_c17_files(content, line, tmp_path):
    """C4: of duplicate keys the first was ignored. C17: recursive aliases hung."""
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    rejected("train", path, names=line)


@pytest.mark.parametrize(
    "content, line",
    [
        (b"\xff\xfe\x00", "not readable as YAML"),
        (b"\x80abc", "not readable as YAML"),
        (b"a: \xc3\x28\n", "not readable as YAML"),
        (b"\x00" * 100, "not readable as YAML"),
        (b"\x7fELF\x02\x01\x01", "not readable as YAML"),
        (b"PK\x03\x04", "not readable as YAML"),
        (bytes(range(256)), "not readable as YAML"),
        (b"a: \xed\xa0\x80\n", "not readable as YAML"),
        ("model: {path: x}\n".encode("utf-16"), "no such folder"),  # valid YAML
        (b"\xef\xbb\xbfmodel: {path: x}\n", "no such folder"),
    ],
)
def test_files_of_bytes(content, line, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    rejected("train", path, names=line)


def test_paths_that_are_not_files(tmp_path):
    rejected("train", tmp_path, names=f"{tmp_path}: not a file")
    rejected("train", tmp_path / "none.yaml", names="cannot be read (No such file or directory)")
    rejected("train", "/dev/zero", names="/dev/zero: not a file")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    rejected("train", tmp_path / "loop.yaml", names="Too many levels of symbolic links")
    os.mkfifo(tmp_path / "pipe.yaml")
    rejected("train", tmp_path / "pipe.yaml", names="pipe.yaml: not a file")
    rejected("train", "a\0b.yaml", names="cannot be read (not a file name)")
    rejected("train", "x" * 5000, names="cannot be read (File name too long)")


def test_a_long_chain_of_bases(tmp_path):
    for i in range(40):
        (tmp_path / f"{i}.yaml").write_text(f"base: {i + 1}.yaml\n")
    rejected("train", tmp_path / "0.yaml", names="base: a chain of more than 16 files")


def test_a_duplicate_in_a_base_names_that_file(tmp_path):
    (tmp_path / "base.yaml").write_text("train: {steps: 1, steps: 2}\n")
    (tmp_path / "top.yaml").write_text("base: base.yaml\n")
    rejected(
        "train",
        tmp_path / "top.yaml",
        names=f"{tmp_path}/base.yaml: train.steps is given twice, in lines 1 and 1",
    )


def test_the_largest_numbers_are_accepted():
    config = Config()
    limits = {key: found.metadata["limit"] for key, found in settings().items()}
    for key, limit in limits.items():
        if limit is not None:
            section, _, name = key.rpartition(".")
            is_float = isinstance(value_of(config, key), float)
            setattr(value_of(config, section), name, float(limit) if is_float else int(limit))
    problems = checks._Problems()
    checks._check_limits(config, problems)
    assert problems.lines == [] and sum(limit is not None for limit in limits.values()) > 30


def test_sft_needs_demonstrations():
    rejected("sft", CONFIG, "warm_start.trajectories=0", names="warm_start.data: must be given")


def test_sft_names_a_file_that_is_missing():
    rejected("sft", CONFIG, "warm_start.data=nowhere.jsonl", names="nowhere.jsonl")
