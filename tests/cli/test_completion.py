"""`imece completion`, in a real bash."""

from __future__ import annotations

import subprocess

import pytest

from imece.cli.completion import OPTIONS
from imece.cli.main import COMMANDS, main
from tests.cli.refused import refused

# Words typed so far -> what bash then offers.
CASES = {
    "imece ex": "export",
    "imece launch --sl": "--slurm",
    "imece train --optimizer.b": "--optimizer.beta1 --optimizer.beta2",
    "imece train --run runs/a --strategy zero": "zero1 zero2 zero3",
    "imece train --strategy = zero": "zero1 zero2 zero3",  # bash takes --strategy=zero apart
    "imece export runs/a out --to ": "hf adapter",
    "imece bench col": "collectives",
    "imece bench save --str": "--strategies",
    "imece bench save --model ": "10.9M 97M",
    "imece eval my-f": "",  # bash then looks for files
}
ASK = """
while IFS= read -r line; do
    read -r -a COMP_WORDS <<< "$line"
    [[ $line == *' ' ]] && COMP_WORDS+=('')
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _imece
    echo "${COMPREPLY[*]}"
done
"""


def test_bash_completes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion"]) == 0
    script = capsys.readouterr().out
    done = subprocess.run(
        ["bash", "--norc", "-uc", f"{script}\ncomplete -p imece\n{ASK}"],
        input="".join(f"{line}\n" for line in CASES), capture_output=True, text=True,
    )  # fmt: skip
    registered, *offered = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert registered == "complete -o default -F _imece imece"
    assert dict(zip(CASES, offered, strict=True)) == CASES


def test_it_knows_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert {name.partition(" ")[0] for name in OPTIONS} == COMMANDS.keys() and all(OPTIONS.values())
    assert "takes no options" in refused(capsys, "completion", "zsh")
