"""What a run would cost, before it starts: `python estimation.py --job.config_file NAME.toml --estimation.gpus N`.

Takes the arguments of train.py, needs neither a GPU nor the network, and starts no process. It ends with status 3 when
the run doesn't fit on the hardware, 2 when the config is wrong.
"""

from __future__ import annotations

from titan.config.startup import estimation_config, exit_on_mistake


def main() -> None:
    loaded, world_size = estimation_config()

    from titan.estimation.run import estimate
    from titan.estimation.search_report import search

    with exit_on_mistake():
        task = search if loaded.config.estimation.search else estimate
        status = task(loaded, world_size)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
