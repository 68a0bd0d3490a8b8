"""examples/kubernetes: the manifests fit together, and the command in job.yaml runs as they say."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from imece.cli.main import main
from imece.launchers import read_world
from imece.store import listen
from tests.train.small import options

FOLDER = Path(__file__).parents[2] / "examples/kubernetes"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def documents(name: str) -> dict[str, Any]:
    """Of one file, by their kind."""
    yaml = pytest.importorskip("yaml")
    found = list(yaml.safe_load_all((FOLDER / name).read_text()))
    return {document["kind"]: document for document in found}


def container(job: dict[str, Any]) -> dict[str, Any]:
    """The only one of a pod."""
    (found,) = job["spec"]["template"]["spec"]["containers"]
    return dict(found)


def environment(job: dict[str, Any], index: int) -> dict[str, str]:
    """What Kubernetes makes of `env` in the pod of an index."""
    fields = {INDEX: str(index), "metadata.namespace": "lab"}
    environ = {"JOB_COMPLETION_INDEX": str(index)}
    for variable in container(job)["env"]:
        value = variable.get("value") or fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        assert isinstance(value, str), f"{variable['name']}: Kubernetes takes strings only"
        environ[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda match: environ[match[1]], value)
    return environ


@pytest.mark.parametrize("name", ["job.yaml", "one-pod.yaml"])
def test_a_mistake_is_not_repeated(name: str) -> None:
    """What Kubernetes demands of a Job with a podFailurePolicy, and time to save."""
    job = documents(name)["Job"]
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] >= 120
    mistake, disruption = job["spec"]["podFailurePolicy"]["rules"]
    assert mistake["action"] == "FailJob" and mistake["onExitCodes"] == {
        "containerName": container(job)["name"], "operator": "In", "values": [2],
    }  # fmt: skip
    assert disruption == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container(job)["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    words = container(job)["command"]
    assert words[words.index("--run") + 1].startswith(mounts["runs"] + "/")


@pytest.mark.parametrize("name", ["job.yaml", "one-pod.yaml"])
def test_commands_are_ours(name: str) -> None:
    words = container(documents(name)["Job"])["command"]
    assert words[:4] == ["python", "-m", "imece", "train"] and all(isinstance(word, str) for word in words)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*words[3:], "--print-config"]) == 0
    assert 'run = "/runs/first"' in out.getvalue() and '"/data"' in out.getvalue()


def test_the_command_for_torchrun_is_one() -> None:
    """In a comment: torchrun's own parser and ours take it."""
    from torch.distributed.run import get_args_parser

    text = (FOLDER / "job.yaml").read_text()
    (found,) = re.findall(r"^#   command: \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    words = [word.strip() for word in re.sub(r"\n#", " ", found).split(",")]
    assert words[:3] == ["python", "-m", "torch.distributed.run"]
    environ = environment(documents("job.yaml")["Job"], 1)
    words = [re.sub(r"\$\((\w+)\)", lambda match: environ[match[1]], word) for word in words[3:]]
    parsed = get_args_parser().parse_args(words)
    assert (parsed.node_rank, parsed.master_port, parsed.training_script) == (1, 29500, "imece")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*parsed.training_script_args, "--print-config"]) == 0
    assert 'run = "/runs/first"' in out.getvalue() and '"/data"' in out.getvalue()


def test_pods_find_each_other() -> None:
    found = documents("job.yaml")
    job, service = found["Job"], found["Service"]
    name, spec = job["metadata"]["name"], job["spec"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": name}
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert environment(job, 0)["OMP_NUM_THREADS"] == container(job)["resources"]["limits"]["cpu"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    worlds = [read_world(environment(job, index)) for index in range(spec["completions"])]
    first = f"{name}-0.{service['metadata']['name']}.lab.svc.cluster.local"
    for rank, world in enumerate(worlds):
        assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (
            rank, spec["completions"], 0, 1,
        )  # fmt: skip
        assert world.master_addr == first and world.master_port


@pytest.mark.slow
def test_two_indexes_train(tmp_path: Path) -> None:
    """As on two nodes, only that these share an address."""
    job = documents("job.yaml")["Job"]
    with listen() as probe:
        port = str(probe.getsockname()[1])
    words = container(job)["command"]
    words = [*words[: words.index("--run")], *options(tmp_path, "run", "--steps=2")]
    processes = []
    own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    for index in range(2):
        environ = own | environment(job, index)
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "IMECE_HOST": f"pod-{index}"}
        processes.append(
            subprocess.Popen(
                [sys.executable, *words[1:]], env=environ | {"OMP_NUM_THREADS": "1"}, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    try:
        outputs = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "2 on 2 hosts" in outputs[0][0] and (tmp_path / "run/summary.json").is_file()
    said = "imece: started by RANK and WORLD_SIZE: a rank that dies ends the run\n"
    assert said in outputs[0][1] and said not in outputs[1][1]
