"""Read from environment variables which rank a launcher has started this process as.

Each launcher has names of its own for the same four numbers. They are read here, held against each
other, and passed on under torchrun's names, which torch reads.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from meshplan.errors import ApplyError, Origin, Problem, SpecError
from meshplan.files import read_bytes
from meshplan.shown import shown


@dataclass(frozen=True, slots=True)
class _Launcher:
    """The environment variables of one launcher.

    Args:
        name: The launcher, for messages.
        rank: Variable of the rank; it is set in every process that this launcher starts.
        world_size: Variable of the number of ranks.
        local_rank: Variable of the rank among those of the same machine.
        local_world_size: Variables of the number of ranks of this machine; the first that is set
            counts.
        job: Variables that identify the job on all of its machines.
        start: How its ranks are started, for the fix of a problem.
    """

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: tuple[str, ...]
    job: tuple[str, ...]
    start: str


_TORCHRUN: Final = _Launcher(
    "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_WORLD_SIZE",),
    ("TORCHELASTIC_RUN_ID",), "start the ranks with meshplan launch or torchrun",
)  # fmt: skip
_PLAIN: Final = _Launcher(
    "the environment", "RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_WORLD_SIZE",), (),
    "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for every rank, or unset all of them for "
    "one process",
)  # fmt: skip
_SLURM: Final = _Launcher(
    "SLURM", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID",
    ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
    ("SLURM_JOB_ID", "SLURM_STEP_ID"), "start the ranks with srun",
)  # fmt: skip
_LAUNCHERS: Final = (
    # mpirun and jsrun start their daemons with srun inside a SLURM job, whose variables then count
    # the daemons. Therefore SLURM is the last.
    _Launcher(
        "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",), ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        "start the ranks with mpirun",
    ),
    _Launcher(
        "LSF", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK",
        ("JSM_NAMESPACE_LOCAL_SIZE",), ("LSB_JOBID",), "start the ranks with jsrun",
    ),
    _Launcher(
        "PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",), (),
        "start the ranks with mpiexec",
    ),
    _SLURM,
)  # fmt: skip
_BY_HAND: Final = ("bash", "interactive")
"""Names of SLURM jobs in which a person types: the variables are of the shell, not of a rank."""
_NODE_LISTS: Final = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_RANK_FILE: Final = "LSB_DJOB_RANKFILE"
_MOST_BYTES: Final = 2**24
_LOCALHOST: Final = "127.0.0.1"
FAST_DEV_RUN: Final = "MESHPLAN_FAST_DEV_RUN"
"""Variable of a fast development run: the number of batches after which a loop ends."""
_TORCH_PORT: Final = 29500
"""The default of torchrun's MASTER_PORT."""
_FIRST_PORT, _NUM_PORTS = 15000, 10000
"""Ports for jobs that state none: below those that Linux gives to outgoing connections."""
_MOST_PORT: Final = 2**16 - 1


@shown
@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRank:
    """The place of this process among those that a launcher has started.

    Args:
        launcher: The launcher, for messages.
        rank: This rank.
        world_size: Number of ranks.
        local_rank: Rank among those of this machine.
        local_world_size: Number of ranks of this machine; None if the launcher does not say.
        host: Machine of rank 0; "" for a single rank.
        port: Port at which rank 0 is met.
        world_size_variable: Variable that states `world_size`, for messages.
        local_rank_variable: Variable that states `local_rank`, for messages.
        start: How the ranks are started, for the fix of a problem.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    host: str
    port: int
    world_size_variable: str
    local_rank_variable: str
    start: str

    @property
    def torch_variables(self) -> dict[str, str]:
        """The same facts under torchrun's names."""
        facts = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "MASTER_ADDR": self.host,
            "MASTER_PORT": self.port if self.host else None,
        }
        return {name: str(fact) for name, fact in facts.items() if fact not in (None, "")}


def read_fast_dev_run(environ: Mapping[str, str]) -> int | None:
    """Return the number of batches of a fast development run; None for a run in earnest.

    Raises:
        ApplyError: The variable is no number of at least 1.
    """
    text = environ.get(FAST_DEV_RUN, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text) >= 1):
        what = f"{FAST_DEV_RUN} is {text!r}, which is no number of batches"
        raise ApplyError(Problem(what, fix="set it to 1 or more, or unset it"))
    return int(text)


def read_rank(environ: Mapping[str, str]) -> LaunchedRank | None:
    """Return this process's place in the job; None if no launcher has started it.

    Raises:
        ApplyError: Variables are missing, are no numbers, or contradict each other.

    >>> read_rank({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
    ...            "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}).host
    '127.0.0.1'
    """
    launcher = _launcher(environ)
    if launcher is None:
        return None
    problems: list[Problem] = []
    rank = _number(environ, launcher.rank, launcher, problems)
    world = _number(environ, launcher.world_size, launcher, problems, least=1)
    is_alone = launcher is _PLAIN and not environ.get(launcher.local_rank)
    local = 0 if is_alone else _number(environ, launcher.local_rank, launcher, problems)
    variable = next((name for name in launcher.local_world_size if environ.get(name)), "")
    local_world = _tasks_of_node(environ, launcher, variable, problems) if variable else None
    if not problems:
        problems += _contradictions(launcher, rank, world, local, (variable, local_world))
    host, port = "", _TORCH_PORT
    if not problems and (world > 1 or environ.get("MASTER_ADDR")):
        host = _host(environ, launcher, local_world == world, problems)
        port = _port(environ, launcher, problems)
    if problems:
        raise ApplyError(problems)
    return LaunchedRank(
        launcher=launcher.name, rank=rank, world_size=world, local_rank=local,
        local_world_size=local_world, host=host, port=port,
        world_size_variable=launcher.world_size, local_rank_variable=launcher.local_rank,
        start=launcher.start,
    )  # fmt: skip


def size_variable(environ: Mapping[str, str]) -> str:
    """Return the variable that states the number of ranks, also after WORLD_SIZE was set from it.

    >>> size_variable({"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"})
    'SLURM_NTASKS'
    """
    stated = environ.get("RANK"), environ.get("WORLD_SIZE")
    equal = (
        launcher.world_size
        for launcher in _LAUNCHERS
        if (environ.get(launcher.rank), environ.get(launcher.world_size)) == stated
    )
    return "WORLD_SIZE" if "TORCHELASTIC_RUN_ID" in environ else next(equal, "WORLD_SIZE")


def _launcher(environ: Mapping[str, str]) -> _Launcher | None:
    if environ.get("RANK") or environ.get("WORLD_SIZE"):
        return _TORCHRUN if "TORCHELASTIC_RUN_ID" in environ else _PLAIN
    for launcher in _LAUNCHERS:
        # srun offers PMI too, but then only SLURM says which rank of its machine a process is.
        is_whole = launcher.name != "PMI" or launcher.local_rank in environ
        if launcher is _SLURM and environ.get("SLURM_JOB_NAME") in _BY_HAND:
            continue
        if launcher.rank in environ and (is_whole or _SLURM.rank not in environ):
            return launcher
    return None


def _number(
    environ: Mapping[str, str],
    name: str,
    launcher: _Launcher,
    problems: list[Problem],
    least: int = 0,
) -> int:
    """Return the number of a variable; append a problem and return `least` if it has none."""
    text = environ.get(name, "")
    what = ""
    if not text:
        what = f"it is not set, although {launcher.name} has to set it for every rank"
    elif not re.fullmatch(r"\s*[+-]?[0-9]{1,9}\s*", text):
        what = f"'{text}' is not a whole number"
    elif int(text) < least:
        what = f"{int(text)} is less than {least}"
    if what:
        problems.append(Problem(what, Origin(name), launcher.start))
        return least
    return int(text)


def _tasks_of_node(
    environ: Mapping[str, str], launcher: _Launcher, name: str, problems: list[Problem]
) -> int | None:
    """Return the ranks of this machine; SLURM writes "4(x2),3" for two nodes of 4 and one of 3."""
    text = environ[name]
    if launcher is not _SLURM or text.strip().isdecimal():
        return _number(environ, name, launcher, problems, least=1)
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([0-9]{1,9})(?:\(x([0-9]{1,6})\))?\s*", part)
        if found is None:
            what = f"'{text}' is not a number of tasks such as 4 or 4(x2)"
            problems.append(Problem(what, Origin(name), launcher.start))
            return None
        counts += [int(found[1])] * int(found[2] or 1)
    node = environ.get("SLURM_NODEID", "0")
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else counts[0]


def _contradictions(
    launcher: _Launcher, rank: int, world: int, local: int, of_machine: tuple[str, int | None]
) -> Iterator[Problem]:
    """Yield a problem for each pair of numbers that no job can have.

    Args:
        launcher: The launcher.
        rank: This rank.
        world: Number of ranks.
        local: Rank among those of this machine.
        of_machine: The variable of the number of ranks of this machine, and that number.
    """
    local_variable, local_world = of_machine
    stated = f"{launcher.world_size} is {world}"
    if rank >= world:
        what = f"{rank} is not a rank of this job: {stated}, so ranks are 0 to {world - 1}"
        yield Problem(what, Origin(launcher.rank), launcher.start)
    if local > rank:
        what = f"{local} is more than the rank itself, {launcher.rank} {rank}"
        yield Problem(what, Origin(launcher.local_rank), launcher.start)
    if local_world is None:
        return
    if local_world > world:
        what = f"{local_world} ranks of this machine are more than all ranks: {stated}"
        yield Problem(what, Origin(local_variable), launcher.start)
    elif local >= local_world:
        what = f"{local} is not a rank of this machine: {local_variable} is {local_world}"
        yield Problem(what, Origin(launcher.local_rank), launcher.start)
    elif rank < world and world % local_world == 0 and rank % local_world != local:
        what = (
            f"{local} on rank {rank}: with {local_world} ranks on each machine it would be "
            f"{rank % local_world}, because a mesh needs the ranks of a machine in a row"
        )
        fix = "start the ranks node by node" + (
            ": srun --distribution=block" if launcher is _SLURM else ", as torchrun does"
        )
        yield Problem(what, Origin(launcher.local_rank), fix)


def _host(
    environ: Mapping[str, str], launcher: _Launcher, is_one_machine: bool, problems: list[Problem]
) -> str:
    """Return the machine of rank 0; append a problem and return "" if nothing says which it is."""
    if stated := environ.get("MASTER_ADDR"):
        return stated
    nodes = next((environ[name] for name in _NODE_LISTS if environ.get(name)), "")
    if launcher is _SLURM and nodes:
        return first_host(nodes)
    if launcher.name == "LSF" and (path := environ.get(_RANK_FILE)):
        hosts = _hosts_of_file(path, problems)
        if hosts:
            return hosts[0]
        if problems:
            return ""
    if is_one_machine:
        return _LOCALHOST
    what = f"it is not set, and {launcher.name} does not say on which machine rank 0 runs"
    fix = "export MASTER_ADDR=HOST, the machine of rank 0, for every rank"
    if launcher.name == "Open MPI":
        fix += ": mpirun -x MASTER_ADDR"
    problems.append(Problem(what, Origin("MASTER_ADDR"), fix))
    return ""


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list.

    >>> first_host("gpu[007-010,012],login1"), first_host("a,b")
    ('gpu007', 'a')
    """
    found = re.match(r"([^\[,]+)(?:\[([0-9]+)[^\]]*\]([^\[,]*))?", nodes.strip())
    if found is None:
        return nodes.strip()
    return found[1] + (found[2] or "") + (found[3] or "")


def _hosts_of_file(path: str, problems: list[Problem]) -> list[str]:
    """Return the hosts that run ranks of an LSF job: all of the rank file but the launching one."""
    try:
        text = read_bytes(path, _MOST_BYTES, "a rank file").decode(errors="replace")
    except (SpecError, FileNotFoundError) as error:
        what = f"its file {path} cannot be read"
        if isinstance(error, SpecError):
            what += f": {error.problems[0].what}"
        problems.append(Problem(what, Origin(_RANK_FILE), "export MASTER_ADDR=HOST instead"))
        return []
    return text.split()[1:]


def _port(environ: Mapping[str, str], launcher: _Launcher, problems: list[Problem]) -> int:
    """Return the port at which rank 0 is met: the stated one, or one that follows from the job."""
    name = "MASTER_PORT"
    if environ.get(name):
        port = _number(environ, name, launcher, problems, least=1)
        if port > _MOST_PORT:
            what = f"{port} is not a port: those are 1 to {_MOST_PORT}"
            problems.append(Problem(what, Origin(name), "export MASTER_PORT=29500"))
        return port
    job = ".".join(environ[name] for name in launcher.job if environ.get(name))
    return _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS if job else _TORCH_PORT
