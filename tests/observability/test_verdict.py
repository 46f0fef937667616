from titan.observability.verdict import Report, judge

LATE = "5 s (comm.train_timeout_seconds)"


def report(waits_in: str = "", late: str = LATE, broken: str = "", stacks: str = "") -> Report:
    return Report("step 3", waits_in, late, broken, stacks)


WAITING = report("all_reduce of [[3]] in group default_pg")


def test_the_rank_that_others_wait_for_is_named_with_its_stacks() -> None:
    verdict = judge({0: WAITING, 1: report(stacks="in sleep"), 2: WAITING}, 3)
    assert verdict.culprits == (1,)
    assert verdict.text == (
        "rank 1 did not get past step 3 within 5 s (comm.train_timeout_seconds); ranks 0, 2 wait in step 3 "
        "(all_reduce of [[3]] in group default_pg)\nstacks of rank 1:\nin sleep"
    )


def test_a_rank_that_does_not_answer_comes_before_busy_ones() -> None:
    verdict = judge({0: report(), 2: report("send", late="", broken="Connection closed by peer")}, 3)
    assert verdict.culprits == (1,)
    assert verdict.text.startswith("rank 1 did not answer: the process is dead or stopped, or its host can't be")
    assert verdict.text.endswith("; rank 2 waits in step 3 (send)")


def test_many_silent_ranks_are_counted() -> None:
    verdict = judge({0: WAITING}, 1000)
    assert "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 991 more did not answer" in verdict.text
    assert len(verdict.culprits) == 999


def test_ranks_that_wait_for_each_other() -> None:
    verdict = judge({0: WAITING, 1: report("recv of [[8]] in group pp")}, 2)
    assert verdict.culprits == (0, 1)
    assert "rank 1: step 3, recv of [[8]] in group pp" in verdict.text


def test_a_broken_connection_between_the_living_blames_nobody_who_is_busy() -> None:
    verdict = judge({0: report(late=""), 1: report("a collective", late="", broken="reset by peer")}, 2)
    assert verdict.culprits == (1,) and "reset by peer" in verdict.text
