"""`imece completion`: prints a script by which bash completes commands, options and their choices.

All of it is in the script: bash asks no Python, which would take seconds to import torch at each tab.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from imece.cli.bench import BENCHMARKS
from imece.cli.convert import ConvertOptions
from imece.cli.doctor.doctor import DoctorOptions
from imece.cli.evaluate import EvalOptions
from imece.cli.export.export import ExportOptions
from imece.cli.launch.drill import DrillOptions
from imece.cli.launch.options import LaunchOptions
from imece.cli.launch.slurm import SlurmOptions
from imece.cli.main import COMMANDS
from imece.cli.options import options_of
from imece.cli.plan.options import PlanOptions
from imece.cli.sample import SampleOptions
from imece.errors import UserError
from imece.train.config import TrainConfig

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "train": {"--print-config": bool} | options_of(TrainConfig),
    "sample": options_of(SampleOptions),
    "eval": options_of(EvalOptions),
    "export": options_of(ExportOptions),
    "plan": options_of(PlanOptions),
    "convert": options_of(ConvertOptions),
    "launch": {"--slurm": bool} | options_of(LaunchOptions) | options_of(SlurmOptions),
    "drill": options_of(DrillOptions),
    "doctor": options_of(DoctorOptions),
} | {f"bench {name}": options_of(bench.plan) for name, bench in BENCHMARKS.items()}
"""By command: its options, each with its type."""

_SCRIPT = """\
# bash completion for imece
_imece() {{
    local words= command=${{COMP_WORDS[1]}}
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
    if [[ $word == = ]]; then word=; elif [[ $before == = ]]; then before=${{COMP_WORDS[COMP_CWORD-2]}}; fi
    [[ $command == bench ]] && command+=" ${{COMP_WORDS[2]}}"
    if ((COMP_CWORD == 1)); then
        words='{commands}'
    elif ((COMP_CWORD == 2)) && [[ ${{COMP_WORDS[1]}} == bench ]]; then
        words='{benchmarks}'
    else
        case "$command $before" in
{choices}
            *) [[ $word == -* ]] && case $command in
{options}
            esac ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _imece imece"""


def run(argv: Sequence[str]) -> int:
    """`imece completion`: exit status 0."""
    if argv:
        raise UserError("imece completion takes no options: it prints a script for bash")
    print(
        _SCRIPT.format(
            commands=" ".join([*COMMANDS, "--help", "--version"]),
            benchmarks=" ".join(BENCHMARKS),
            choices="\n".join(
                f"            '{command} {name}') words='{' '.join(choices)}' ;;"
                for command, options in OPTIONS.items()
                for name, choices in _choices(options)
            ),
            options="\n".join(
                f"                '{command}') words='{' '.join(sorted({'--help', *options}))}' ;;"
                for command, options in OPTIONS.items()
            ),
        )
    )
    return 0


def _choices(options: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """The options that take one of a few words, each with these words."""
    for name, kind in options.items():
        kinds = [kind, *get_args(kind)]
        found = [str(each) for one in kinds if get_origin(one) is Literal for each in get_args(one)]
        if found:
            yield name, found
