"""`megatron-tsp flip`: what comes out is run by a real bash and compared word for word."""

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron_tsp import cli
from megatron_tsp.errors import TSPError
from megatron_tsp.flip import flip

TP, SP, TSP = "--tensor-model-parallel-size", "--sequence-parallel", "--tsp-size"
RUN = ["-m", "megatron_tsp.run"]

_RECORD = '#!/bin/bash\nprintf \'%s\\0\' "${0##*/}" "$@" >>"$ARGV"; printf \'\\1\\0\' >>"$ARGV"\n'


@pytest.fixture(scope="module")
def launchers(tmp_path_factory):
    """A folder with a torchrun and a python that write down how they were called."""
    folder = tmp_path_factory.mktemp("bin")
    for name, text in {
        "torchrun": _RECORD,
        "python": _RECORD,
        "srun": '#!/bin/bash\n"$@"\n',
    }.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def argv(script: bytes, launchers) -> list[list[str]]:
    """The words of each launch, as a real bash gives them."""
    path, record = launchers / "script.sh", launchers / "argv"
    path.write_bytes(script)
    record.unlink(missing_ok=True)
    environment = {"PATH": f"{launchers}:{os.environ['PATH']}", "ARGV": str(record)}
    subprocess.run(
        ["bash", str(path), "one", "two words"],
        env=environment,
        check=True,
        capture_output=True,
        timeout=30,
    )
    words = record.read_bytes().decode("utf-8", "surrogateescape").split("\0")[:-1]
    launches, launch = [], []
    for word in words:
        if word == "\1":
            launches.append(launch)
            launch = []
        else:
            launch.append(word)
    return launches


def as_tsp(launch: list[str]) -> list[str]:
    """What a launch should become; one without the flag stays."""
    words = []
    if not any(word.split("=")[0] == TP for word in launch):
        return launch
    for word in launch:
        if word.endswith(".py") and "megatron_tsp.run" not in words:
            words += RUN
        words.append(TSP + word.removeprefix(TP) if word.split("=")[0] == TP else word)
    return words


def assert_flips(script: str | bytes, launchers, back=True) -> str:
    script = script.encode() if isinstance(script, str) else script
    flipped = flip(script).apply().encode("latin-1")
    before, after = argv(script, launchers), argv(flipped, launchers)
    assert before and after == [as_tsp(launch) for launch in before]
    if back:
        assert flip(flipped, reverse=True).apply().encode("latin-1") == script
    return flipped.decode("utf-8", "surrogateescape")


ARRAYS = r"""#!/bin/bash
#SBATCH --nodes=2   # --tensor-model-parallel-size 8 in a comment
set -euo pipefail
TP=${TP:-4}
DATA_PATH=$1
MODEL_ARGS=(
    --num-layers 2      # two
    --hidden-size 64 --num-attention-heads 8
    # --tensor-model-parallel-size 2
    --attention-dropout 0.0
    "--note" 'it'\''s "quoted" $HOME'
)
PARALLEL=(
    --tensor-model-parallel-size $TP
	--pipeline-model-parallel-size 1
    --sequence-parallel
)
MODEL_ARGS+=("${PARALLEL[@]}")
echo "TP: --tensor-model-parallel-size $TP" 2>&1 | tee /dev/null
torchrun --nproc-per-node 8 "$PWD/pretrain_gpt.py" \
    "${MODEL_ARGS[@]}" \
    --data-path "$DATA_PATH" ${EXTRA:-} "$@" 2>&1 | cat
"""

SCRIPTS = {
    "arrays": ARRAYS,
    "one line": f"torchrun pretrain_gpt.py {TP} 2 {SP} --attention-dropout 0\n",
    "equals": f'torchrun pretrain_gpt.py "{TP}=2" {SP} --attention-dropout=0',
    "equals a variable": f'T=2\npython -u pretrain_gpt.py {TP}="$T" {SP} --attention-dropout=0\n',
    "the last of two counts": f"""
A=({TP} 4 {SP} --attention-dropout 0)
torchrun x/pretrain_gpt.py "${{A[@]}}" {TP} 2
""",
    "a string, unquoted": f"""
options=" \\
  {TP} ${{SIZE:-2}} \\
  {SP} --attention-dropout 0 \\
  --split 99,1,0"
torchrun --nproc-per-node 2 ../pretrain_gpt.py ${{options}} $options
""",
    "a command in a string": f"""
OPTIONS="--attention-dropout 0 {SP}"
CMD="torchrun --nproc-per-node 2 pretrain_gpt.py {TP} 2 $OPTIONS"
echo "$CMD"
$CMD
eval $CMD
srun bash -c "$CMD"
srun sh -lc "cd . && ${{CMD}} > /dev/null; true"
""",
    "an array in a string": f"""
A=({TP} 2 {SP})
LAUNCH=(torchrun --nproc-per-node 2)
CMD="${{LAUNCH[*]}} x/pretrain_gpt.py ${{A[@]}} --attention-dropout 0"
srun bash -c "$CMD"
srun bash -c "${{LAUNCH[*]}} pretrain_gpt.py ${{A[*]}} --attention-dropout 0 >/dev/null"
$CMD --seed 1
""",
    "a function": f"""
launch() {{ local script=$1; shift; torchrun "$script" "$@"; }}
run() {{ echo "+ $*"; "$@"; }}
A=({TP} 2 {SP} --attention-dropout 0)
run torchrun pretrain_gpt.py "${{A[@]}}"
""",
    "branches": f"""
A=(--attention-dropout 0)
if [[ $1 == one ]]; then A+=({TP} 2 {SP}); else A+=({TP} 4 {SP}); fi
[[ $2 == x ]] && A+=(--qk-layernorm)
case $1 in one) N=2 ;; *) N=4 ;; esac
for seed in 1 2; do torchrun pretrain_gpt.py ${{A[@]}} --num-layers $N --seed $seed; done
""",
    "the flag in a variable": f"""
FLAG={TP}
SIZE='{TP} 4'
SCRIPT="pretrain_gpt.py"; [ -n "$SCRIPT" ]
torchrun $SCRIPT $FLAG 2 $SIZE {SP} --attention-dropout 0
""",
    "elements that are split": f"""
A=("{TP} 2" "{SP}" "--attention-dropout 0"
   "--split '99,1,0'")
torchrun pretrain_gpt.py ${{A[@]}}
""",
    "self-reference and export": f"""
export A="{TP} 2"
A="$A {SP}"
A+=" --attention-dropout 0"
declare -a B=(torchrun --nproc-per-node 2)
B=("${{B[@]}}" pretrain_gpt.py)
NCCL_DEBUG=INFO "${{B[@]}}" $A >"/dev/null" --seed 1
""",
    "not UTF-8, CR in a comment": f"torchrun pretrain_gpt.py {TP} 2 {SP} --attention-dropout 0 "
    "--note '\udcff\xe9' # \r\n",
    "escapes": f"""torchrun pretrain_gpt.py {SP} --note a\\ b\\"c --attention-dropout 0 \\
    {TP} \\
      2 --x "a\\"b \\$c" $'t\\tn' --y "" '' """,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_flips_and_flips_back(name, launchers):
    assert_flips(SCRIPTS[name].encode("utf-8", "surrogateescape"), launchers)


def test_only_what_must_change_does():
    flipped = flip(ARRAYS.encode()).apply().splitlines()
    changed = {
        number: (old, new)
        for number, (old, new) in enumerate(zip(ARRAYS.splitlines(), flipped, strict=True), 1)
        if old != new
    }
    assert changed == {
        14: ("    --tensor-model-parallel-size $TP", "    --tsp-size $TP"),
        20: (
            'torchrun --nproc-per-node 8 "$PWD/pretrain_gpt.py" \\',
            'torchrun --nproc-per-node 8 -m megatron_tsp.run "$PWD/pretrain_gpt.py" \\',
        ),
    }


def test_the_report_says_what_changed_and_what_was_not_seen():
    edits = flip(ARRAYS.encode())
    assert edits.changes == [
        f"line 14: {TP} -> {TSP}: the TSP group is the tensor-parallel group",
        "line 20: added -m megatron_tsp.run: TSP is switched in there",
    ]
    notes = "\n".join(edits.notes)
    assert f"{SP} stays" in notes
    assert "not checked, the value is not in the script: --data-path $1" in notes
    assert "not seen, it is not in the script: ${EXTRA:-}, $@" in notes
    assert "not flags of Megatron's, left as they are: --note" in notes


REFUSED = {
    "a setting": (f"torchrun pretrain_gpt.py {TP} 2 --attention-dropout 0 --fp8-format hybrid",
                  "--fp8-format hybrid"),
    "in one branch": (f"A=(--attention-dropout 0)\nif x; then A+=(--tp-comm-overlap); fi\n"
                      f"torchrun pretrain_gpt.py {TP} 2 ${{A[@]}}", "--tp-comm-overlap"),
    "in one of two branches": (f"if x; then D=(--optimizer muon); else D=(--optimizer adam); fi\n"
                               f'torchrun pretrain_gpt.py {TP} 2 "${{D[@]}}"', "optimizer muon"),
    "sizes": (f"torchrun pretrain_gpt.py {TP} 3 --attention-dropout 0 --num-attention-heads 8",
              "--num-attention-heads 8 is not divisible by --tsp-size 3"),
    "a bad value": (f"torchrun pretrain_gpt.py {TP} two", "invalid int value: 'two'"),
    "nothing to flip": ("torchrun pretrain_gpt.py --num-layers 2 ${A[@]}",
                        f"no command here has {TP} (not in the script: ${{A[@]}})"),
    "only in a comment": (f"torchrun pretrain_gpt.py # {TP} 2", f"no command here has {TP}"),
    "both": (f"torchrun pretrain_gpt.py {TP} 2\nx {TSP} 2", f"line 2: {TSP} is there already"),
    "a here-document": (f"torchrun pretrain_gpt.py {TP} 2\ncat >x <<EOF\n{TP} 4\nEOF\n",
                        "line 3: --tensor-model-parallel-size is not seen to reach"),
    "an option of the script": (f"case $1 in {TP}) T=$2 ;; esac\ntorchrun pretrain_gpt.py "
                                f"{TP} $T", "line 1: --tensor-model-parallel-size is not seen"),
    "an inner quotation": (f"torchrun pretrain_gpt.py {TP} 2\nbash -c \"x '{TP} 4'\"",
                           "line 2: --tensor-model-parallel-size is not seen"),
    "unused": (f"A=({TP} 2)\ntorchrun pretrain_gpt.py {TP} 2", "line 1: --tensor-model"),
    "in pieces": ("torchrun pretrain_gpt.py --tensor-model-'parallel'-size 2",
                  f"{TP} is written in pieces"),
    "over a line's end": (f"torchrun pretrain_gpt.py {TP} 2 --a\\\n-b",
                          "line 1: this is not read as bash"),
    "printed into a file": (f"torchrun pretrain_gpt.py {TP} 2\necho {TP} 2 >args",
                            "line 2: no word of this command ends in .py"),
    "printed into a variable": (f"A=$(echo {TP} 2)\ntorchrun pretrain_gpt.py $A",
                                "line 1: no word of this command ends in .py"),
    "printed to another program": (f"printf '%s' '{TP} 2' | xargs torchrun a.py {TP} 2 ",
                                   "line 1: --tensor-model-parallel-size is not seen"),
    "printed into another variable": (f"printf -v A %s {TP}\ntorchrun a.py {TP} 2",
                                      "line 1: no word of this command ends in .py"),
    "flags as a command": (f"torchrun a.py\n{TP} 2", "line 2: no word of this command ends"),
    "shifted arguments": (f'f() {{ s=$1; shift; torchrun "$s" "$@"; }}\nf pretrain_gpt.py {TP} 2',
                          "(not in the script: $@)"),
    "elements by number": (f"A=(torchrun pretrain_gpt.py {TP} 2)\n${{A[@]}}\nls ${{A[1]}}",
                           "line 3: elements of A are picked by their number"),
    "words split elsewhere": (f"IFS=,\nA={TP},2\ntorchrun a.py $A", "line 1: IFS is set"),
    "no script": (f"torchrun $SCRIPT {TP} 2", "no word of this command ends in .py"),
    "an unknown launcher": (f"deepspeed pretrain_gpt.py {TP} 2", "not started by python"),
    "a launcher that is not there": (f"$RUN pretrain_gpt.py {TP} 2", "not started by python"),
    "not bash": (f"torchrun pretrain_gpt.py {TP} 2 )", "line 1: this is not read as bash"),
    "not seen as bash": (f'torchrun pretrain_gpt.py {TP} 2 --x ${{A:-b}}\\ c',
                         "line 1: this is not read as bash"),
    "a yaml configuration": (f"torchrun pretrain_gpt.py {TP} 2 --yaml-cfg x", "--yaml-cfg"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_carried_or_not_understood_is_refused_by_name(name):
    script, message = REFUSED[name]
    with pytest.raises(TSPError) as error:
        flip(script.encode())
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (f"torchrun pretrain_gpt.py {TSP} 2 {TP} 2", f"{TP} is there beside {TSP}"),
        (f"torchrun pretrain_gpt.py {TSP} 2 --tsp-blocks mlp", "--tsp-blocks has no counterpart"),
        ("torchrun pretrain_gpt.py --num-layers 2", f"no command here has {TSP}"),
        (f"R=(-m megatron_tsp.run)\ntorchrun ${{R[@]}} pretrain_gpt.py {TSP} 2", "--keep-entry"),
    ],
)
def test_what_does_not_flip_back_is_refused_by_name(script, message):
    with pytest.raises(TSPError) as error:
        flip(script.encode(), reverse=True)
    assert message in str(error.value)


def test_a_tsp_launch_becomes_tp_and_sp():
    def back(script, **options):
        return flip(script.encode(), reverse=True, **options).apply()

    ours = "torchrun -m megatron_tsp.pretrain_gpt"
    assert back(f"{ours} {TSP} 2 --seed 1") == f"{ours} {TP} 2 {SP} --seed 1"
    assert back(f"{ours} {TSP}=$D --seed 1") == f"{ours} {TP}=$D {SP} --seed 1"
    assert back(f'{ours} {TSP} "$D"') == f'{ours} {TP} "$D" {SP}'
    assert back(f"A='{TSP} 2'\n{ours} $A") == f"A='{TP} 2 {SP}'\n{ours} $A"
    # what only our entry knows keeps it
    kept = f"torchrun -m megatron_tsp.run p.py {TSP} 2 --tsp-record x"
    assert back(kept) == f"torchrun -m megatron_tsp.run p.py {TP} 2 {SP} --tsp-record x"
    patched = f"torchrun pretrain_gpt.py {TP} 2 {SP} --attention-dropout 0"
    flipped = flip(patched.encode(), keep_entry=True).apply()
    assert flipped == patched.replace(TP, TSP)
    assert back(flipped, keep_entry=True) == patched


def test_another_size():
    line = f"torchrun pretrain_gpt.py {TP} 2 {SP} --attention-dropout 0"
    assert flip(line.encode(), size=4).apply() == (
        f"torchrun -m megatron_tsp.run pretrain_gpt.py {TSP} 4 {SP} --attention-dropout 0"
    )
    assert f"{TSP}=4" in flip(line.replace(f"{TP} 2", f"{TP}=2").encode(), size=4).apply()
    variable = f"T=2\n{line.replace(f'{TP} 2', f'{TP} $T')}"
    assert f"{TSP} $T" in flip(variable.encode(), size=2).apply()
    with pytest.raises(TSPError, match=r"line 2: the tensor-parallel size is \$T; set it to 4"):
        flip(variable.encode(), size=4)
    with pytest.raises(TSPError, match="at least 1"):
        flip(line.encode(), size=0)
    with pytest.raises(TSPError, match="drop it, or --reverse"):
        flip(line.encode(), size=4, reverse=True)


# ---------------------------------------------------------------------------------------------
# Round trip
# ---------------------------------------------------------------------------------------------

_TEXT = st.text(st.sampled_from("ab1 ='\"\\$#*;&(){}[]é\n\t-"), max_size=6)
_BARE = st.text(st.sampled_from("ab1=_./,:@%+-é"), min_size=1, max_size=5).filter(
    lambda text: not text.startswith(("-", "="))
)


@st.composite
def quoted(draw, text):
    """A word in one of the ways in which bash lets it be written."""
    ways = ["'" + text.replace("'", "'\\''") + "'"]
    escaped = "".join("\\" + c if c in '"\\$`' else c for c in text)
    ways.append(f'"{escaped}"')
    if text and all(c.isalnum() or c in "_./,:@%+=-" for c in text):
        ways += [text, text, text]
    return draw(st.sampled_from(ways))


@st.composite
def scripts(draw):
    """A launch script: some flags, spread over arrays, strings, variables and the command."""
    degree = str(draw(st.sampled_from([1, 2, 4])))
    flags = [[SP], ["--attention-dropout", "0"]]
    flags += [["--num-layers", "4"], ["--hidden-size", "64"], ["--swiglu"]]
    flags += draw(st.lists(st.tuples(st.just("--note"), _TEXT).map(list), max_size=3))
    flags += draw(st.lists(st.tuples(st.just("--data-path"), _BARE, _BARE).map(list), max_size=1))
    tensor = draw(
        st.sampled_from([[TP, degree], [f"{TP}={degree}"], [TP, "$TP"], [TP, '"${TP}"'],
                         [TP, "${TP:-8}"], [f"{TP}=$TP"], [f'"{TP}=${{TP}}"']])
    )  # fmt: skip
    rendered = [tensor]
    rendered += draw(st.lists(st.just([TP, degree]), max_size=1))
    for flag in draw(st.permutations(flags)):
        rendered.append([draw(quoted(word)) for word in flag])
    rendered = draw(st.permutations(rendered))

    lines = ["#!/bin/bash", f"# {TP} 8 stays", f"TP={degree}"]
    call = []
    for number, words in enumerate(rendered):
        plain = not any(c in word for word in words for c in "'\"\\\n\t $*?[]{}#;&()") or (
            words is tensor and '"' not in "".join(words)
        )
        places = ["command", "array", "array", "appended"] + ["string", "unquoted"] * plain
        place = draw(st.sampled_from(places))
        if place == "command":
            call += words
        elif place == "string":
            blank = draw(st.sampled_from([" ", "  ", " \\\n   ", "\n"]))
            lines.append(f'S{number}="{draw(st.sampled_from(["", " "]))}{blank.join(words)} "')
            call.append(draw(st.sampled_from([f"$S{number}", f"${{S{number}}}"])))
        else:
            blank = draw(st.sampled_from([" ", "\n    ", " # it's \"\n  ", "\t"]))
            inside = blank.join(words) + ("\n" if "\n" in blank else "")
            lines.append(f"A{number}=({inside})")
            if place == "appended":
                lines[-1] = f"A{number}=(--seed 1)"
                lines.append(f"A{number}+=({inside})")
            name = f"${{A{number}[@]}}"
            call.append(name if place == "unquoted" else f'"{name}"')
    script = draw(st.sampled_from(["pretrain_gpt.py", '"$PWD/my pretrain_gpt.py"', "./a/b.py"]))
    launcher = draw(st.sampled_from(["torchrun --nnodes 1", "python -u", "srun torchrun"]))
    blank = draw(st.sampled_from([" ", " \\\n    "]))
    wrapped = draw(st.sampled_from(["", "run ", "if true; then "]))
    if wrapped == "run ":
        lines.append('run() {\n  "$@"\n}')
    end = "; fi" if wrapped.startswith("if") else draw(st.sampled_from(["", " # end", " | cat"]))
    lines.append(wrapped + blank.join([launcher, script, *call]) + end)
    return "\n".join(lines) + draw(st.sampled_from(["", "\n"]))


def property_test(examples):
    """The same examples in every run; FLIP_EXAMPLES=n draws n new ones."""
    drawn = os.environ.get("FLIP_EXAMPLES")
    return settings(
        max_examples=int(drawn or examples),
        derandomize=not drawn,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@property_test(60)
@given(script=scripts())
def test_any_script_of_the_usual_forms_flips_and_flips_back(script, launchers):
    assert_flips(script, launchers)


@property_test(80)
@given(script=scripts(), data=st.data())
def test_a_damaged_script_is_flipped_rightly_or_refused(script, data, launchers):
    at = data.draw(st.integers(0, len(script)))
    end = data.draw(st.integers(at, min(at + 3, len(script))))
    script = script[:at] + data.draw(st.sampled_from(list("'\"\\$#(){}; \n-="))) + script[end:]
    assume("$$" not in script and "$!" not in script)  # differ from run to run
    try:
        flipped = flip(script.encode())
    except TSPError:
        return
    try:
        before = argv(script.encode(), launchers)
    except (subprocess.CalledProcessError, FileNotFoundError):
        assume(False)  # bash itself does not run it, or it launches nothing
    result = flipped.apply().encode("latin-1")
    assert argv(result, launchers) == [as_tsp(launch) for launch in before]
    if not any("TP alone" in note for note in flipped.notes):
        assert flip(result, reverse=True).apply().encode("latin-1") == script.encode()


def test_the_comparison_sees_a_wrong_flip(launchers, monkeypatch):
    """The twin: a flip that also touches a value, and one that moves the entry."""
    from megatron_tsp.flip import edits

    monkeypatch.setattr(edits.Edits, "apply", lambda self: self.source.replace(TP, TSP))
    with pytest.raises((AssertionError, TSPError)):
        assert_flips(ARRAYS, launchers)


# ---------------------------------------------------------------------------------------------
# YAML
# ---------------------------------------------------------------------------------------------

YAML = f"""# MODEL_ARGS of a test; {TP}: 2
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --num-layers: 2   # two
  "{TP}": 4   # é {TP}
  {SP}: true
  --attention-dropout: 0.0
  --bf16: false
  --data-path: ["a b", '${{DATA}}/x']
TEST_TYPE: regular
"""


def test_yaml_flips_and_flips_back():
    edits = flip(YAML.encode())
    flipped = edits.apply().encode("latin-1")
    assert flipped.decode() == YAML.replace(f'"{TP}"', f'"{TSP}"')
    assert flip(flipped, reverse=True).apply().encode("latin-1") == YAML.encode()
    assert "not checked, the value is not in the script: --data-path a b ${DATA}/x" in edits.notes
    four = flip(YAML.encode(), size=2).apply()
    assert f'"{TSP}": 2   #' in four


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"MODEL_ARGS:\n  {TSP}: 2 # x\n  --seed: 1\n",
         f"MODEL_ARGS:\n  {TP}: 2\n  {SP}: true # x\n  --seed: 1\n"),
        (f"MODEL_ARGS: {{{TSP}: 2, --seed: 1}}",
         f"MODEL_ARGS: {{{TP}: 2, {SP}: true, --seed: 1}}"),
        (f"MODEL_ARGS:\n  {TSP}: 2\n  {SP}: false\n", f"MODEL_ARGS:\n  {TP}: 2\n  {SP}: true\n"),
    ],
)  # fmt: skip
def test_yaml_of_tsp_becomes_tp_and_sp(before, after):
    assert flip(before.encode(), reverse=True).apply() == after


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"MODEL_ARGS:\n  {TP}: 2\n  --fp8-format: hybrid\n  --attention-dropout: 0", "--fp8-"),
        ("MODEL_ARGS:\n  --seed: 2", f"MODEL_ARGS has no {TP}"),
        (f"MODEL_ARGS:\n  {TP}: 2\n  {TP}: 4", "line 3: --tensor-model-parallel-size is given twi"),
        (f"MODEL_ARGS:\n  {TP}: 2\n  {TSP}: 2", f"line 3: {TSP} is there already"),
        (f"MODEL_ARGS:\n  {TP}: 2\nARMS:\n  a:\n    {TP}: 4", "line 5: --tensor-model-parallel-s"),
        (f"MODEL_ARGS: &a\n  {TP}: 2\nB: *a", "line 3: YAML aliases (*a) are not followed"),
        (f"MODEL_ARGS:\n  - {TP}: 2", "there is no mapping MODEL_ARGS"),
        (f"MODEL_ARGS: {{{TP}: 2", "this is not YAML"),
        (f"MODEL_ARGS:\n  {TP}: {{a: 2}}", f"{TSP}: expected one value or a list"),
    ],
)
def test_yaml_that_does_not_flip_is_refused_by_name(text, message):
    with pytest.raises(TSPError) as error:
        flip(text.encode())
    assert message in str(error.value)


# ---------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------


def test_the_command(tmp_path, capfd):
    script = tmp_path / "train.sh"
    script.write_text(ARRAYS)
    assert cli.main(["flip", str(script)]) == 0
    out, err = capfd.readouterr()
    assert out.encode() == flip(ARRAYS.encode()).apply().encode("latin-1")
    assert f"{script}: line 14: {TP} -> {TSP}" in err

    assert cli.main(["flip", "--check", str(script)]) == 0
    out, err = capfd.readouterr()
    assert f"{script}: line 14" in out and "torchrun" not in out and not err

    line = f"torchrun pretrain_gpt.py {TP} 2 {SP}"
    assert cli.main(["flip", f"{line} --attention-dropout 0"]) == 0
    longer = f"{line} --attention-dropout 0" + " --num-workers 0" * 30  # no file has such a name
    assert cli.main(["flip", "--check", longer]) == 0
    assert capfd.readouterr().out.startswith("torchrun -m megatron_tsp.run pretrain_gpt.py --tsp-s")
    assert cli.main(["flip", "--check", f"{line} --use-mup"]) == 2
    assert "command line: --use-mup does not work" in capfd.readouterr().err
    assert cli.main(["flip", str(tmp_path / "none.sh")]) == 2
    assert f"cannot read {tmp_path / 'none.sh'}" in capfd.readouterr().err
    assert script.read_text() == ARRAYS


CHECKOUT = os.environ.get("MEGATRON_LM_PATH")


@pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM_PATH names no Megatron-LM checkout")
def test_megatron_lms_own_scripts_flip_or_are_refused_by_name():
    flipped = []
    for path in sorted(Path(CHECKOUT, "examples").rglob("*.sh")):
        text = path.read_bytes()
        if TP.encode() not in text:
            continue
        try:
            edits = flip(text)
        except TSPError as error:
            assert "line " in str(error) or "--" in str(error)
            continue
        flipped.append(path.name)
        if SP.encode() in text:
            back = flip(edits.apply().encode("latin-1"), reverse=True)
            assert back.apply().encode("latin-1") == text
    assert flipped
