"""Whatever a user types either runs, or gives one line and exit status 2."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser

from imece import __version__
from imece.cli.launch.launch import split
from imece.cli.main import COMMANDS, main
from imece.errors import UserError
from imece.launch.generations import Limits
from imece.launch.hosts.here import Plan
from imece.train.watch.stopping import Stop


def run(*argv: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `imece ARGV`; --help leaves by SystemExit."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(argv)
        except SystemExit as leaving:
            status = int(leaving.code or 0)
    return status, out.getvalue(), err.getvalue()


def refused(*argv: str) -> str:
    status, out, err = run(*argv)
    assert status == 2 and out == "" and err.startswith("imece: ") and err.count("\n") == 1, (argv, out, err)
    return err


def test_help_and_version() -> None:
    status, out, err = run("--help")
    assert (status, err) == (0, "") and all(f"\n  {name} " in out for name in COMMANDS)
    assert run("--version") == (0, f"imece {__version__}\n", "")
    status, out, err = run("launch", "--help")
    assert status == 0 and "--ranks" in out and "script.py" in out
    assert "usage: imece launch [-h] [OPTIONS] SCRIPT [its arguments]\n" in out
    for words in ("drill", "launch --slurm"):
        usage = f"usage: imece {words} [-h] [OPTIONS] SCRIPT [its arguments]\n"
        assert run(*words.split(), "--help")[1].startswith(usage)
    assert run("bench", "--help")[0] == 0
    for argv in ((), ("bench",)):
        status, out, err = run(*argv)
        assert (status, err) == (2, "") and out.startswith("usage: imece ")
        assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("lunch", "did you mean launch?"),
        ("xyzzy", "the commands are train"),
        ("launch", "how many ranks?"),
        ("launch script.py", "imece launch --ranks 2 script.py"),
        ("launch 4 script.py", "For 4: imece launch --ranks 4 script.py"),
        ("launch --ranks 2", "no script"),
        ("launch --ranks 1 --nproc-per-node 2 x.py", "--ranks 1 and --nproc-per-node 2: how many ranks?"),
        ("launch -n 2 --ranks 3 x.py", "-n 2 and --ranks 3: how many ranks?"),
        ("launch x.py -n 2", "-n stands behind the script, so it is the script's"),
        ("launch -q 2 x.py", "there is no option -q (see"),
        ("launch --slurm -n 2 missing.py", "there is no script 'missing.py'"),
        ("launch --ranks 2 --ranks 3 x.py", "--ranks 2 and --ranks 3: how many ranks? Say it once"),
        ("drill --nproc_per_node=2 --ranks 3 x.py", "--nproc-per-node 2 and --ranks 3: how many ranks?"),
        ("launch --ranks 2 --", "no script"),
        ("launch --ranks 0 x.py", "--ranks 0"),
        ("launch --ranks -1 x.py", "--ranks -1"),
        ("launch --ranks 99999 x.py", "99999"),
        ("launch --nproc_per_node=0 x.py", "--ranks 0"),
        ("launch --nproc-per-node many x.py", "'many'"),
        ("launch --nnodes 2 --ranks 2 x.py", "which of the 2 hosts is this? --host-rank 0"),
        ("launch --nnodes=1:4 --ranks 2 x.py", "--nnodes 1:4"),
        ("launch --node_rank 1 --ranks 2 x.py", "--host-rank 1: there is one host"),
        ("launch --hosts 2 --host-rank 2 --ranks 2 --rendezvous a:1 x.py", "--host-rank 2: 2 hosts have"),
        ("launch --hosts 0 --ranks 2 x.py", "--hosts 0"),
        ("launch --hosts 2 --host-rank 0 --ranks 2 x.py", "where do the 2 hosts meet? --rendezvous"),
        ("launch --hosts 2 --host-rank 0 --rendezvous a --ranks 2 x.py", "'a' is no HOST:PORT"),
        ("launch --hosts 2 --host-rank 0 --rendezvous a:0 --ranks 2 x.py", "'a:0' is no HOST:PORT"),
        (
            "launch --hosts 2 --host-rank 0 --rendezvous a..b:29400 --ranks 2 tests/conftest.py",
            "no way from here to a..b:29400: that is no host's name",
        ),
        ("launch --hosts 99 --host-rank 0 --rendezvous a:1 --ranks 999 x.py", "up to 16384 ranks in all"),
        ("launch --nnodes 2 --node-rank 0 --master-addr a --ranks 2 x.py", "'a:' is no HOST:PORT"),
        ("launch --hosts 2 --host-rank 0 --rendezvous a:1 --ranks 2 --min-ranks 5 x.py", "from 1 to 4"),
        ("launch --slurm --hosts 2 --ranks 2 x.py", "--hosts: with --slurm the hosts are SLURM's nodes"),
        ("drill --hosts 2 --host-rank 1 --rendezvous a:1 --ranks 2 x.py", "give imece drill on host 0"),
        ("launch --max-restarts 2 x.py", "how many ranks?"),
        ("launch -n 2 no-such.py", "no-such.py"),
        ("launch --nonsense x.py", "--nonsense"),
        ("launch --ranks 2 --max-restarts -1 x.py", "--max-restarts -1"),
        ("launch --ranks 2 --min-ranks 3 x.py", "--min-ranks 3: from 1 to 2"),
        ("launch --ranks 2 --silent-s 0.1 x.py", "--silent-s 0.1"),
        ("launch --ranks 1 --log-dir /dev/null/x tests/conftest.py", "/dev/null/x"),
        ("launch --ranks 1 --log-dir /proc tests/conftest.py", "the folder '/proc' for logs cannot be"),
        ("launch --ranks 2 missing.py", "'missing.py'"),
        ("launch --ranks 2 ../missing.py", "'../missing.py'"),
        ("launch --ranks 2 /", "'/' is a folder without a __main__.py: name a script"),
        (
            "launch tests/conftest.py --ranks 2",
            "--ranks stands behind the script, so it is the script's. For two:",
        ),
        ("launch --ranks 2 -m missing_module", "'missing_module'"),
        ("launch --ranks 2 -m ../x", "'../x'"),
        ("launch --ranks 2 -m __main__", "'__main__'"),
        ("launch --ranks 2 -m tests/conftest.py", "that is a script and no module; leave -m out"),
        ("launch --ranks 1 --log-dir= tests/conftest.py", "--log-dir: there is nothing after it"),
        ("launch --ranks 2 --no-python missing-program", "'missing-program'"),
        ("launch -m --no-python --ranks 2 x", "exclude"),
        ("launch --rank 2 x.py", "did you mean --ranks?"),
        ("launch --ranks 2 --grace-s -1 x.py", "--grace-s -1.0"),
        ("launch --ranks 2 --grace-s nan x.py", "nan"),
        ("launch --ranks", "--ranks"),
        ("launch --ranks 2 --no-standalon x", "--no-standalon"),
    ],
)
def test_mistakes(argv: str, said: str) -> None:
    assert said in refused(*argv.split())


_OPTIONS = [
    "--ranks",
    "--ranks=2",
    "--nproc-per-node",
    "-m",
    "--no-python",
    "--standalone",
    "--grace-s",
    "--min-ranks",
    "--max_restarts",
    "--silent-s=2",
    "--nnodes=1",
    "--nnodes=2:2",
    "--hosts",
    "--host-rank=0",
    "--rendezvous=127.0.0.1:1",
    "--master_addr=::1",
    "--log-dir",
    "--help",
]
_TYPED = [*_OPTIONS, "launch", "--", "-", "2", "0", "-1", "1e999", "nan", "../../x"]
_WORDS = st.sampled_from([*_TYPED, "x\ny", "\0", "--ranks=\x1b[2J", "é", ""]) | st.text(max_size=6)


@given(st.lists(_WORDS, max_size=7))
@example(["--ranks", "2", "a\0b"])
@example(["--ranks=2", "--rendezvous=127.0.0.1:1", "no-such.py"])
@example(["--ranks", "2", "x" * 5000])
@example(["--ranks", "2", "a\nb\x1b[31m"])
def test_any_words_are_refused_in_one_line(words: list[str]) -> None:
    def no_launch(command: Sequence[str], ranks: int, **_: object) -> int:
        raise UserError("would start")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("imece.cli.launch.launch.launch", no_launch)
        patch.setattr("imece.launch.hosts.agent.launch_here", no_launch)
        status, out, err = run("launch", *words)
    if status == 0:
        assert "--help" in words or "-h" in words or any(word.startswith("-h") for word in words), (
            words,
            out,
        )
        return
    assert status == 2 and err.startswith("imece: ") and err.count("\n") == 1
    assert err[:-1].isprintable()


def test_what_follows_the_script_is_its_own() -> None:
    assert split(["--ranks", "2", "s.py", "--ranks", "3", "--"]) == (
        ["--ranks", "2"],
        ["s.py", "--ranks", "3", "--"],
    )
    assert split(["--nproc_per_node", "2", "s.py"]) == (["--nproc_per_node", "2"], ["s.py"])
    assert split(["-n", "2", "s.py", "-n"]) == (["-n", "2"], ["s.py", "-n"])
    assert split(["--ranks=2", "--", "-s.py"]) == (["--ranks=2"], ["-s.py"])
    assert split(["--ranks", "2", "-m", "a.b", "-m"]) == (["--ranks", "2", "-m"], ["a.b", "-m"])
    assert split(["--ranks"]) == (["--ranks"], [])
    assert split(["--rdzv_id", "x", "-r", "3", "s.py"]) == (["--rdzv_id", "x", "-r", "3"], ["s.py"])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of ranks for which `imece launch` asks, which starts none."""
    numbers: list[int] = []

    def no_launch(command: Sequence[str], limits: Limits, **_: object) -> int:
        numbers.append(limits.ranks)
        return 0

    monkeypatch.setattr("imece.cli.launch.launch.launch", no_launch)
    return numbers


def test_torchruns_options_for_one_host(
    asked: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "s.py").touch()
    words = "--nnodes 1 --nproc_per_node=2 --rdzv-backend c10d --rdzv_endpoint=a:1 --max-restarts=3"
    assert run("launch", *words.split(), str(tmp_path / "s.py"), "--nnodes", "7") == (
        0,
        "",
        "imece: --rdzv-backend, --rdzv-endpoint: not needed, the ranks of one host meet at a free port\n",
    )
    assert run("launch", "--nproc-per-node", "cpu", str(tmp_path / "s.py"))[0] == 0
    assert asked == [2, os.cpu_count()]
    for word, why in (
        ("--tee", "each rank's lines are shown with the rank in front, and --log-dir keeps them in files"),
        ("-r", "each rank's lines are shown with the rank in front, and --log-dir keeps them in files"),
        ("--monitor-interval", "the end of a rank is seen at once"),
        ("--start-method", "each rank is a new process of its own"),
        ("--role", "ranks have no roles here"),
        ("--event-log-handler", "what happens to ranks is told on standard error"),
        ("--local-addr", "the ranks of one host meet at a free port"),
    ):
        _, _, err = run("launch", "--nproc-per-node=1", word, "3", str(tmp_path / "s.py"))
        assert err == f"imece: {word}: not needed, {why}\n"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)  # as the driver says, whatever torch can use
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run("launch", "--nproc-per-node", "gpu", str(tmp_path / "s.py")) == (
        2,
        "",
        "imece: --nproc-per-node gpu: there is no GPU on this host that torch can use\n",
    )


def test_every_option_of_torchrun_is_taken_or_refused_by_name(asked: list[int], tmp_path: Path) -> None:
    (tmp_path / "s.py").touch()
    refusals = {}
    for action in get_args_parser()._actions:
        for option in set(action.option_strings) - {"-h", "--help", "--nproc-per-node", "--nproc_per_node"}:
            value = [] if action.nargs == 0 else ["1"]
            words = ["launch", option, *value, "--nproc-per-node=1", str(tmp_path / "s.py")]
            status, _, err = run(*words)
            if status:
                refusals[option.replace("_", "-")] = err
    assert asked and not [said for said in refusals.values() if "there is no option" in said]
    assert set(refusals) <= {
        "--module", "-m",  # the file is a script
        "--no-python",  # and no program
        "--node-rank",  # there is one host
        "--numa-binding", "--signals-to-handle", "--virtual-local-rank",
    }  # fmt: skip
    said = (
        "imece: --numa-binding: ranks are bound to no cores here: leave it out, or bind in a wrapper (--no-p"
    )
    assert refusals["--numa-binding"].startswith(said)


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        (
            "IMECE_BACKEND=foo",
            "'foo' is none of shm, gloo, nccl, mpi, ucc, xccl; one of your own ",
        ),
        ("IMECE_BACKEND=cpu:gloo,cuda:nkkl", "'nkkl' is none of shm"),
        ("IMECE_BACKEND=gloo,", "IMECE_BACKEND=gloo,: '' is none of shm"),
        ("IMECE_SCHEDULE=hirarchical", "is no schedule: did you mean 'hierarchical'?"),
        ("IMECE_BACKEND=cpu:gloo,cuda:nccl", None),
        ("IMECE_BACKEND=", None),
        ("IMECE_SCHEDULE=auto", None),
    ],
)
def test_variables_are_checked_before_ranks_start(
    variable: str, said: str | None, asked: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(*variable.split("="))
    (tmp_path / "s.py").touch()
    for command in ("launch", "drill"):
        words = (command, "--ranks", "2", str(tmp_path / "s.py"))
        if said is not None:
            assert refused(*words).startswith(f"imece: {variable}") and said in refused(*words)
        elif command == "launch":
            assert run(*words) == (0, "", "")
    assert asked == ([] if said else [2])


def test_interrupted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("imece.cli.launch.launch.launch", interrupted)
    (tmp_path / "s.py").touch()
    assert run("launch", "--ranks", "2", str(tmp_path / "s.py")) == (130, "", "imece: interrupted\n")


def test_interrupted_at_the_very_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes time to import comes where Ctrl-C is an exit status."""
    code = "import sys, imece.cli.main; print({'tyro', 'pathlib', 'torch'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {sys.path}; {code}"],
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    assert done.stdout == "set()\n"

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("imece.cli.main._take_all", interrupted)
    assert run("plan") == (130, "", "imece: interrupted\n")


def test_interrupted_in_an_import() -> None:
    """It ends there: a KeyboardInterrupt would leave half a module."""
    code = """
        import signal, sys
        from types import SimpleNamespace
        from imece.cli import main

        def import_module(name):
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                print("was not left at once", flush=True)

        main.importlib = SimpleNamespace(import_module=import_module)
        sys.exit(main.main(["train"]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "imece: interrupted\n")


def test_a_rank_that_is_interrupted_in_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import comes to its end, and the signal is heard as any later one."""
    ran: list[object] = []

    def as_rank(_: Sequence[str], stop: Stop) -> int:
        ran.append(stop.signal)
        return 7

    def import_module(name: str) -> SimpleNamespace:
        signal.raise_signal(signal.SIGINT)
        ran.append(name)
        return SimpleNamespace(run_as_rank=as_rank)

    monkeypatch.setattr("imece.cli.main.importlib", SimpleNamespace(import_module=import_module))
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert run("train") == (7, "", "")
    assert ran == ["imece.cli.train", signal.SIGINT]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_it_leaves_no_files(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def evaluate(_: Sequence[str]) -> None:
        with tempfile.TemporaryDirectory(dir=tmp_path):
            try:
                os.kill(os.getpid(), number)
            finally:
                os.kill(os.getpid(), number)  # somebody is impatient while it clears up

    heard: list[int] = []
    both = (signal.SIGTERM, signal.SIGHUP)
    before = {each: signal.signal(each, lambda number, _: heard.append(number)) for each in both}
    monkeypatch.setattr("imece.cli.evaluate.run", evaluate)
    try:
        assert run("eval", "r") == (128 + number, "", "")
        assert not os.listdir(tmp_path) and not heard
        os.kill(os.getpid(), number)
        assert heard == [number], "handlers are as they were"
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "imece", "launch", "--ranks", "0", "x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "imece: --ranks 0: from 1 to 1024 ranks can run on one host\n"


@pytest.mark.parametrize(
    ("argv", "unbuffered"),
    [
        (["--help"], ""),
        (["launch", "--help"], ""),
        (["launch", "--help"], "1"),
        (["lunch"], ""),
        (["train", "--model", "tiny", "--data", __file__, "--data.tokenizer", "bytes", "--steps", "1"], ""),
    ],
)
def test_a_reader_that_has_gone_is_no_failure(argv: list[str], unbuffered: str, tmp_path: Path) -> None:
    """As after `imece ... | head -1`: nothing more is said, and the status is that of a death by SIGPIPE."""
    reader, unread = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "imece", *argv], stderr=unread if argv == ["lunch"] else subprocess.PIPE,
        stdout=unread, text=True, timeout=200, check=False, env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        cwd=tmp_path,
    )  # fmt: skip
    os.close(unread)
    assert done.returncode == 141 and not done.stderr, done.stderr


@pytest.mark.parametrize(("argv", "unbuffered"), [("--help", ""), ("plan 7B --gpus 8xH100", "1")])
def test_a_full_disk(argv: str, unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "imece", *argv.split()], stdout=full, stderr=subprocess.PIPE, text=True,
            timeout=200, check=False, env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    said = "standard output cannot be written (No space left on device): make room, or send it elsewhere"
    assert (done.returncode, done.stderr) == (1, f"imece: {said}\n")


def test_another_error_without_a_file_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: list[str]) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("imece.cli.main._run", full)
    with pytest.raises(OSError, match="No space left"):
        run("doctor")


def test_no_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose whole file system is read-only."""

    def nowhere() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    status, _, err = run("bench", "memory", "--quick")
    said = "imece: no folder takes temporary files: set TMPDIR to one that can be written\n"
    assert (status, err) == (2, said)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("can't start new thread"), "raise the limit (ulimit -u or -v, docker --pids-limit)"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "raise ulimit -v"),
    ],
)
def test_limits_of_a_launcher(error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [error, type(error)("something else")]

    def raises(argv: Sequence[str]) -> int:
        raise left.pop(0)

    monkeypatch.setattr("imece.cli.launch.launch.run", raises)
    assert said in refused("launch")
    with pytest.raises(type(error), match="something else"):
        run("launch")


def test_a_name_that_is_no_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="utf-8", errors="strict"))
    assert main(["train", "--print-config", "--run", "\udcff"]) == 0
    assert out.getvalue().startswith(b'run = "\\udcff"\n')


def test_letters_that_the_locale_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")  # as under LC_ALL=C PYTHONUTF8=0
    status, _, err = run("sample", "run", "--prompt", "k\udcc3\udcb6y")
    assert (status, err) == (2, "imece: an argument has letters that this locale lacks: set PYTHONUTF8=1\n")


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Started with stdout and stderr closed, Python has None for them."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert (main(["plan", "7B", "--gpus", "8xH100"]), main(["lunch"])) == (0, 2)
    for stream in (sys.stdout, sys.stderr):
        stream.close()
    monkeypatch.undo()
    assert capfd.readouterr() == ("", "")


def test_what_is_opened_never_takes_the_place_of_an_output() -> None:
    """Started with <&- >&-: ranks would print into the lock of their run, or into a pipe."""
    code = (
        "import os, sys; os.close(0); os.close(1); sys.stdout = None; from imece.cli import main; "
        "main._run = lambda words: os.open(os.devnull, os.O_RDONLY); sys.exit(main.main([]))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=200).returncode > 2


def test_what_prints_nothing_needs_no_room() -> None:
    """As a launcher, whose ranks' output is not worth the job."""
    code = "import sys; from imece.cli import main; main._run = lambda words: 3; sys.exit(main.main([]))"
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-c", code], stdout=full, timeout=200).returncode == 3


def test_another_broken_pipe_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: list[str]) -> int:
        raise BrokenPipeError("to a rank")

    monkeypatch.setattr("imece.cli.main._run", broken)
    with pytest.raises(BrokenPipeError, match="to a rank"):
        main(["doctor"])


def test_torchruns_options_for_several_hosts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[Plan, str]] = []

    def no_launch(command: Sequence[str], plan: Plan, *, job: str, **_: object) -> int:
        asked.append((plan, job))
        return 0

    monkeypatch.setattr("imece.launch.hosts.agent.launch_here", no_launch)
    (tmp_path / "s.py").touch()
    for words in (
        "--hosts 2 --host-rank 1 --rendezvous a:7 --ranks 3 --job x",
        "--nnodes=2 --node_rank=1 --rdzv_endpoint=a:7 --nproc_per_node=3 --rdzv-id x",
        "--nnodes 2:2 --node-rank 1 --master-addr a --master-port 7 --nproc-per-node 3 --rdzv_id=x",
    ):
        assert run("launch", *words.split(), "--min-ranks", "2", str(tmp_path / "s.py")) == (0, "", "")
    words = (
        "--hosts 2 --host-rank 1 --rendezvous a:7 --ranks 3 --job x --min-ranks 2 --rdzv-backend=c10d -t 3"
    )
    assert run("launch", *words.split(), str(tmp_path / "s.py")) == (
        0,
        "",
        "imece: --rdzv-backend: not needed, launchers of several hosts have one way to meet, and find their "
        "own addresses\nimece: -t: not needed, each rank's lines are shown with the rank in front, and "
        "--log-dir keeps them in files\n",
    )
    first, *others = asked
    assert others == 3 * [first] and first[1] == "x"
    plan = first[0]
    assert (plan.hosts, plan.me, plan.rendezvous, plan.ranks) == (2, 1, ("a", 7), 3)
    assert (plan.limits.ranks, plan.limits.min_ranks) == (6, 2)


def test_in_a_folder_that_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though no path is asked of it: a library that is loaded there ends the process without a word."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["plan", "7B", "--gpus", "8xH100"]) == 2
    assert capsys.readouterr().err == "imece: the current folder has been removed: go to one that is there\n"


@pytest.mark.parametrize("how", ["--mount", "--pid"])
def test_without_a_proc_of_its_own(tmp_path: Path, how: str) -> None:
    """Nothing is mounted there; or what is there shows other processes, which must not be taken for ranks."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        pytest.skip("namespaces need root and unshare")
    if subprocess.run(["unshare", how, "true"], check=False).returncode:
        pytest.skip("no such namespaces here")
    (tmp_path / "script.py").touch()
    program = (
        "import imece\n"
        "from imece.cli.main import main\n"
        "print([main(x.split()) for x in ('doctor', 'launch --ranks 1 script.py', 'train --ranks 1')])\n"
        "for begin in (imece.init, lambda: imece.spawn(print, ranks=1)):\n"
        "    try:\n"
        "        begin()\n"
        "    except imece.errors.UserError as error:\n"
        "        print(error)\n"
    )
    mount = "mount -t tmpfs tmpfs /proc; " if how == "--mount" else ""
    found = subprocess.run(
        [
            "unshare",
            how,
            "--fork",
            "--kill-child",
            "sh",
            "-c",
            f'{mount}"$0" -c "$1"',
            sys.executable,
            program,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    statuses, *lines = found.stdout.splitlines() + found.stderr.splitlines()
    assert statuses == "[2, 2, 2]" and len(lines) == 5, found
    assert all("/proc does not show this process: " in line for line in lines), lines
    assert os.listdir(tmp_path) == ["script.py"]
