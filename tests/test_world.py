"""What each launcher's variables mean, and which are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imece.errors import UserError
from imece.launchers import derived_port, first_host, read_world
from imece.world import host_id

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_NTASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[07-09],login1",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-12@1",
}
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def refused(environ: dict[str, str]) -> str:
    with pytest.raises(UserError) as caught:
        read_world(environ)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_nobody_launched_it() -> None:
    world = read_world({})
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (0, 1, 0, 1)
    assert (world.launcher, world.master_addr, world.master_port) == ("single", None, None)


def test_torchrun() -> None:
    world = read_world(TORCHRUN)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (3, 4, 1, 2)
    assert (world.launcher, world.master_addr, world.master_port) == ("torchrun", "10.0.0.1", 29500)


def test_set_by_hand_on_one_host() -> None:
    world = read_world({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "4000"})
    assert (world.local_rank, world.local_world_size) == (1, 2)


def test_slurm() -> None:
    world = read_world(SLURM)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (4, 5, 0, 1)
    assert (world.launcher, world.master_addr) == ("slurm", "gpu07")
    first = read_world({**SLURM, "SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    assert first.local_world_size == 2
    assert first.master_port == world.master_port == derived_port("slurm 77.0")
    other_step = read_world({**SLURM, "SLURM_STEP_ID": "1"})
    assert other_step.master_port != world.master_port and other_step.job != world.job


def test_slurm_step_of_fewer_tasks_than_the_job() -> None:
    environ = {**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
    environ |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    world = read_world(environ)
    assert (world.rank, world.world_size, world.master_addr) == (1, 2, "127.0.0.1")


def test_given_address_and_port_win() -> None:
    for environ in (SLURM, OPENMPI, MPICH):
        world = read_world({**environ, "MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "999"})
        assert (world.master_addr, world.master_port, world.job) == ("10.1.1.1", 999, None)


def test_openmpi() -> None:
    world = read_world(OPENMPI)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (1, 2, 1, 2)
    assert (world.launcher, world.master_addr) == ("openmpi", "127.0.0.1")
    assert world.master_port == derived_port("openmpi prterun-host-12@1")


def test_mpich() -> None:
    world = read_world(MPICH)
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (0, 2, 0, 2)
    assert (world.launcher, world.master_addr, world.master_port) == ("mpich", "127.0.0.1", None)


def test_mpi_on_several_hosts_needs_an_address() -> None:
    assert "MASTER_ADDR" in refused({**OPENMPI, "OMPI_COMM_WORLD_SIZE": "4"})
    assert "MASTER_ADDR" in refused({**MPICH, "PMI_SIZE": "4"})


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (without(TORCHRUN, "WORLD_SIZE"), ["has RANK", "not WORLD_SIZE"]),
        (without(TORCHRUN, "RANK"), ["has WORLD_SIZE", "not RANK"]),
        ({**TORCHRUN, "WORLD_SIZE": "32768"}, ["WORLD_SIZE='32768'", "from 1 to 32767"]),
        (without(TORCHRUN, "LOCAL_RANK"), ["LOCAL_RANK"]),
        (without(TORCHRUN, "MASTER_ADDR"), ["MASTER_ADDR"]),
        (without(TORCHRUN, "MASTER_PORT"), ["MASTER_PORT"]),
        ({**TORCHRUN, "RANK": "4"}, ["RANK=4", "WORLD_SIZE=4"]),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, ["LOCAL_WORLD_SIZE=5", "WORLD_SIZE=4"]),
        ({**TORCHRUN, "WORLD_SIZE": "many"}, ["WORLD_SIZE='many'"]),
        ({**TORCHRUN, "RANK": "-1"}, ["RANK='-1'"]),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, ["MASTER_PORT='70000'", "65535"]),
        ({"LOCAL_RANK": "0"}, ["has LOCAL_RANK", "not RANK"]),
        (without(OPENMPI, "OMPI_COMM_WORLD_RANK"), ["OMPI_COMM_WORLD_RANK"]),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, ["MPI_LOCALRANKID"]),
        (without(SLURM, "SLURM_LOCALID"), ["SLURM_LOCALID"]),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2 each"}, ["2 each"]),
        ({**SLURM, "SLURM_NODEID": "3"}, ["SLURM_NODEID=3", "2(x2),1"]),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, ["SLURM_STEP_NODELIST", "MASTER_ADDR"]),
    ],
)
def test_incomplete_or_malformed(environ: dict[str, str], said: list[str]) -> None:
    message = refused(environ)
    assert all(part in message for part in said), message


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"SLURM_NTASKS": "2"}, ["SLURM_NTASKS=2", "srun"]),  # salloc -n 2, then python
        (
            {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"},
            ["SLURM_NTASKS=2", "srun"],
        ),  # sbatch
        (
            {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"},
            ["SLURM_NTASKS=2", "srun"],
        ),
        ({"SLURM_NTASKS": "2", "RANK": "0", "WORLD_SIZE": "1"}, ["SLURM_NTASKS=2", "WORLD_SIZE=1"]),
        ({**SLURM, "RANK": "0", "WORLD_SIZE": "1"}, ["SLURM_NTASKS=5", "WORLD_SIZE=1"]),
        # every task started a torchrun of its own, which knows of one host
        ({**SLURM, **TORCHRUN, "GROUP_WORLD_SIZE": "1"}, ["SLURM_NTASKS=5", "WORLD_SIZE=4"]),
        ({**OPENMPI, "RANK": "0", "WORLD_SIZE": "1"}, ["OMPI_COMM_WORLD_SIZE=2", "WORLD_SIZE=1"]),
        ({**MPICH, "RANK": "0", "WORLD_SIZE": "1"}, ["PMI_SIZE=2", "WORLD_SIZE=1"]),
        (
            {**MPICH, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            ["rank 0", "1"],
        ),
        ({**SLURM, **MPICH}, ["SLURM_NTASKS=5", "PMI_SIZE=2"]),
    ],
)
def test_launchers_that_disagree(environ: dict[str, str], said: list[str]) -> None:
    message = refused(environ)
    assert all(part in message for part in said), message


def test_launchers_that_agree() -> None:
    # torchrun once a host under srun; mpiexec inside an allocation, by way of one daemon a host
    hosts = {**SLURM, "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}
    hosts["SLURM_STEP_TASKS_PER_NODE"] = "1(x2)"
    assert read_world({**hosts, **TORCHRUN}).launcher == "torchrun"
    two_hosts = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    address = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert read_world({**hosts, **two_hosts, **address}).world_size == 4
    # torchrun or imece launch inside an allocation, on purpose
    assert read_world({**TORCHRUN, "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}).world_size == 4
    # a wrapper that exports RANK from the launcher's own
    exported = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    assert read_world({**OPENMPI, **exported}).rank == 1


def test_node_lists() -> None:
    assert first_host("gpu[07-09,12],cpu1") == "gpu07"
    assert first_host("a-b.c,d") == "a-b.c"
    assert first_host("rack[3]-n,x") == "rack3-n"
    assert first_host("n[1,3-4]") == "n1"
    assert first_host("a[1-3,7],b[01-02]") == "a1"
    assert first_host("rack[0-3,5]n[01-02],x[1]") == "rack0n01"
    assert first_host("r[2]c[1]n[7]-ib") == "r2c1n7-ib"
    for wrong in ("", "[1-2]", "n[", "n[a-b]", "a b"):
        with pytest.raises(UserError):
            first_host(wrong)


def test_a_members_own_launcher() -> None:
    member = {**TORCHRUN, "IMECE_MEMBER": "7", "IMECE_AGENT_PORT": "4711"}
    assert (
        read_world(member).agent_port == 4711 and read_world(without(member, "IMECE_AGENT_PORT")).member == 7
    )
    assert read_world({**member, "IMECE_JOINING": "1"}).agent_port == 4711
    # What a rank starts is no member of its job.
    assert read_world(without(member, "IMECE_MEMBER")).agent_port is None
    assert "IMECE_AGENT_PORT='0'" in refused({**member, "IMECE_AGENT_PORT": "0"})


def test_a_host_of_the_job_may_be_missing() -> None:
    member = {**TORCHRUN, "IMECE_MEMBER": "7"}
    alone = {**member, "RANK": "1", "WORLD_SIZE": "2"}  # GROUP_WORLD_SIZE is still 2 hosts
    assert not read_world(member).is_partial and read_world(alone).is_partial
    assert read_world({**member, "IMECE_JOINING": "1"}).is_partial
    # torchrun's own restarts count the hosts anew
    assert not read_world(without(alone, "IMECE_MEMBER")).is_partial


def test_hosts_are_told_apart() -> None:
    assert host_id({}) == host_id({}) != host_id({"IMECE_HOST": "a"})
    assert read_world({"IMECE_HOST": "a"}).host == "a"


_NAMES = sorted(
    {*TORCHRUN, *SLURM, *OPENMPI, *MPICH, "SLURM_STEP_NUM_TASKS", "IMECE_HOST", "SLURM_TASKS_PER_NODE"}
)
_VALUES = st.one_of(
    st.sampled_from(
        ["0", "1", "2", "3", "4", "-1", "", " 2 ", "1e3", "٣", "99999999999999999999", "2(x2),1"]
    ),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8),
)


@given(st.dictionaries(st.sampled_from(_NAMES), _VALUES))
def test_any_environment_is_a_world_or_a_user_error(environ: dict[str, str]) -> None:
    try:
        world = read_world(environ)
    except UserError as error:
        assert "\n" not in str(error)
        return
    assert 0 <= world.rank < world.world_size
    assert 0 <= world.local_rank < world.local_world_size <= world.world_size
    assert world.world_size == 1 or world.launcher != "single"
