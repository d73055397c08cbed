"""What this project has to know of Hydra's launchers."""

from __future__ import annotations

import os

from omegaconf import DictConfig

from refusals import UsageError


def jobs_at_once(name: str, launcher: DictConfig) -> int | None:
    """How many jobs may run at the same time, by the launcher's own configuration.

    name: of the group `hydra/launcher`. None where the configuration sets no limit: a cluster's
    queue, for one, is not known here. UsageError if there is room for none.
    """
    cores = os.cpu_count() or 1
    if name == "basic":
        return 1
    if name.startswith("ray"):
        keys, at_once = "ray.init.num_cpus and ray.remote.num_cpus", _of_ray(launcher, cores)
    elif "n_jobs" in launcher:  # joblib's, for which None is one and -1 as many as there are cores
        keys, at_once = "n_jobs", 1 if launcher.n_jobs is None else launcher.n_jobs
        at_once = max(1, cores + 1 + at_once) if at_once < 0 else at_once
    else:
        keys, at_once = "array_parallelism", launcher.get("array_parallelism")  # submitit's
    if at_once is not None and at_once < 1:
        raise UsageError(
            f"hydra/launcher={name} has room for no job: expected more in hydra.launcher.{keys}"
        )
    return at_once


def _of_ray(launcher: DictConfig, cores: int) -> int | None:
    """Of a Ray of its own, by cores alone; an existing one (`ray.init.address`) has its own."""
    ray = launcher.get("ray") or {}
    init, remote = ray.get("init") or {}, ray.get("remote") or {}
    if init.get("address") or os.environ.get("RAY_ADDRESS"):
        return None
    each = float(remote.get("num_cpus", 1))
    return int(float(init.get("num_cpus") or cores) / each) if each else None
