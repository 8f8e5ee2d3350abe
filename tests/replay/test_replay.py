"""The step loop: every feature happens, every output is right, and a replay can be repeated."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving_conv.errors import ContractError
from serving_conv.replay import ReplayOptions, ReplayReport, Request, Trace, replay_trace

Play = Callable[..., ReplayReport]
ENTRIES = ("prefill", "verify", "decode")


def test_everything_happens_and_every_output_is_right(play: Play, excerpt: Trace) -> None:
    report = play(excerpt)
    assert report.mismatches == ()
    assert report.requests == len(report.timeline.finished) == 40
    assert report.preemptions["recompute"] > 0
    assert report.preemptions["import"] > 0
    assert report.slots_high_water == 7
    assert report.prefix_hits > 0
    assert report.checkpoints_evicted > 0
    assert 0 < report.drafts_accepted < report.drafts
    assert set(report.transitions) == {f"{a}>{b}" for a, b in itertools.product(ENTRIES, ENTRIES)}
    assert report.timeline.live[-1] == 0


def test_one_launch_a_layer_gives_the_same(play: Play, excerpt: Trace) -> None:
    apart, together = play(excerpt), play(excerpt, launch="step")
    assert together.mismatches == ()
    assert together.transitions == apart.transitions
    assert together.timeline == apart.timeline


@pytest.mark.gpu
@pytest.mark.parametrize("launch", ["entries", "step", "graphs"])
@pytest.mark.parametrize("layout", ["channels", "positions"])
def test_on_a_gpu(play: Play, excerpt: Trace, launch: str, layout: str) -> None:
    report = play(excerpt, device="cuda", launch=launch, layout=layout, channels=64)
    assert report.backend == "cuda"
    assert report.mismatches == ()


@pytest.mark.parametrize("layout", ["channels", "positions"])
@pytest.mark.parametrize(
    ("dtype", "state_dtype"), [("float32", None), ("float16", "bfloat16"), ("bfloat16", "float32")]
)
def test_types_and_layouts(play: Play, excerpt: Trace, layout: str, dtype: str, state_dtype: str | None) -> None:
    trace = Trace("few", excerpt.requests[:12])
    assert play(trace, layout=layout, dtype=dtype, state_dtype=state_dtype, slots=5).mismatches == ()


@pytest.mark.parametrize("resume", ["recompute", "import", "alternate"])
@pytest.mark.parametrize("blocks", [(), (1, 2)])
def test_one_slot_for_many_requests(play: Play, resume: str, blocks: tuple[int, ...]) -> None:
    requests = [Request(index, 0.0, 600, 150, blocks) for index in range(4)]
    report = play(requests, slots=2, patience=0.0, resume=resume)
    assert report.mismatches == ()
    assert report.slots_high_water == 1
    wanted = {"recompute", "import"} if resume == "alternate" else {resume}
    assert set(report.preemptions) == wanted
    assert min(report.preemptions.values()) > 1
    # Every admission computes some tokens that are new: preemption cannot go on for ever.
    assert sum(report.preemptions.values()) < 4 * 750 / 32


def test_a_full_batch_preempts_as_a_full_pool_does(play: Play) -> None:
    report = play([Request(index, 0.0, 20, 150) for index in range(3)], slots=8, max_sequences=1, patience=0.0)
    assert report.mismatches == ()
    assert report.slots_high_water == 1
    assert sum(report.preemptions.values()) > 1


def test_patience_and_room_leave_everyone_in_peace(play: Play) -> None:
    requests = [Request(index, 0.0, 20, 150) for index in range(3)]
    assert play(requests, slots=2, patience=1e6).preemptions == {}
    assert play(requests, slots=4, patience=0.0).preemptions == {}


def test_the_clock(play: Play) -> None:
    # Three prompts of one step each; the third arrives while nobody is there, and the clock jumps to it.
    requests = [Request(0, 0.0, 100, 0), Request(1, 0.01, 50, 0), Request(2, 1000.0, 10, 0)]
    report = play(requests, step_ms=20, token_us=100)
    assert report.steps == 3
    assert report.timeline.time == pytest.approx([0.03, 0.055, 1000.021])
    assert report.timeline.latency == pytest.approx([0.03, 0.045, 0.021])
    assert report.trace_seconds == report.timeline.time[-1]


def test_first_tokens_come_in_order_of_arrival(play: Play) -> None:
    requests = [Request(index, index * 0.001, 300, 40) for index in range(10)]
    report = play(requests, slots=3, patience=1e6)
    assert report.timeline.finished == sorted(report.timeline.finished)
    first = [done - late for done, late in zip(report.timeline.first_token, report.timeline.latency, strict=True)]
    assert all(value < 0 for value in first)


def test_steps_stay_within_their_rows(play: Play, excerpt: Trace) -> None:
    report = play(Trace("few", excerpt.requests[:6]), max_step_tokens=50)
    sizes = [sum(step) for step in zip(*report.timeline.rows.values(), strict=True)]
    assert max(sizes) == 50
    assert sum(sizes) == sum(report.rows.values())
    assert report.mismatches == ()


class TestPrefixes:
    def test_a_repeated_prompt_is_saved_up_to_its_last_checkpoint(self, play: Play) -> None:
        # The first publishes its last full block, 1024; the second starts there and publishes 1088; the third there.
        report = play([Request(index, 10.0 * index, 1100, 5, (1, 2, 3)) for index in range(3)])
        assert (report.prefix_hits, report.prefix_tokens_saved) == (2, 1024 + 1088)
        assert report.block_tokens == 3300
        assert report.mismatches == ()

    def test_the_last_prompt_token_is_always_computed(self, play: Play) -> None:
        report = play([Request(index, 10.0 * index, 1024, 5, (1, 2)) for index in range(3)])
        assert report.prefix_tokens_saved == 512 + 960
        assert report.mismatches == ()

    def test_a_conversation_goes_on_from_its_last_full_block(self, play: Play) -> None:
        turns = [Request(0, 0.0, 1100, 5, (1, 2, 3)), Request(1, 9.0, 1700, 5, (1, 2, 4, 5))]
        report = play(turns)
        assert report.prefix_tokens_saved == 1024
        assert report.mismatches == ()

    def test_a_common_beginning_is_published_by_the_second_that_has_it(self, play: Play) -> None:
        report = play([Request(index, 10.0 * index, 1500, 5, (1, 10 + index, 20 + index)) for index in range(3)])
        assert (report.prefix_hits, report.prefix_tokens_saved) == (1, 512)
        assert report.mismatches == ()

    def test_requests_that_come_together_share_nothing_yet(self, play: Play) -> None:
        report = play([Request(index, 0.0, 1100, 5, (1, 2, 3)) for index in range(3)], max_step_tokens=4096)
        assert report.prefix_tokens_saved == 0
        assert report.mismatches == ()

    def test_a_request_that_was_preempted_starts_from_its_own_checkpoint(self, play: Play) -> None:
        requests = [Request(index, 0.0, 1100, 100, (index, 8, 9)) for index in range(2)]
        report = play(requests, max_sequences=1, patience=0.0, resume="recompute", max_step_tokens=2048)
        assert report.preemptions["recompute"] > 0
        assert report.resume_prefix_tokens == 1024 * report.preemptions["recompute"]
        assert report.prefix_tokens_saved == 0
        assert report.mismatches == ()

    def test_a_prefix_that_another_published_meanwhile_may_reach_beyond_what_was_computed(self, play: Play) -> None:
        # Preempted in the middle of its prompt; when it comes back, the other has computed more of the same prompt.
        requests = [Request(index, 0.0, 1100, 40, (1, 2, 3)) for index in range(2)]
        report = play(requests, max_sequences=1, patience=0.0, resume="recompute", max_step_tokens=100)
        assert report.resume_prefix_tokens > 0
        assert report.mismatches == ()

    def test_granularity(self, play: Play) -> None:
        requests = [Request(index, 10.0 * index, 400, 5, (1,)) for index in range(3)]
        saved = {every: play(requests, checkpoint_every=every).prefix_tokens_saved for every in (1, 64, 256, 512)}
        assert saved == {1: 399, 64: 384, 256: 256, 512: 0}


@pytest.mark.parametrize(
    ("acceptance", "share"),
    [(0.0, 0.0), (1.0, 1.0)],
)
def test_acceptance_at_its_ends(play: Play, acceptance: float, share: float) -> None:
    report = play([Request(0, 0.0, 5, 200)], acceptance=acceptance)
    assert report.drafts > 0
    assert report.drafts_accepted == share * report.drafts
    assert report.mismatches == ()


def test_without_drafts_there_are_no_speculative_steps(play: Play, excerpt: Trace) -> None:
    report = play(Trace("few", excerpt.requests[:10]), draft_tokens=0)
    assert report.drafts == 0
    assert "verify" not in report.rows
    assert report.mismatches == ()


def test_a_replay_can_be_repeated(play: Play, excerpt: Trace) -> None:
    trace = Trace("few", excerpt.requests[:10])
    first, again, other = (play(trace, seed=seed).to_json() for seed in (0, 0, 1))
    for found in (first, again, other):
        del found["wall_time"]
    assert first == again
    assert first["rows"] != other["rows"]


def test_what_is_played_does_not_depend_on_the_check(play: Play, excerpt: Trace) -> None:
    trace = Trace("few", excerpt.requests[:12])
    checked, unchecked = (play(trace, check=check).to_json() for check in (True, False))
    assert (checked["mismatches"], unchecked["mismatches"]) == (0, None)
    for name in ("steps", "rows", "transitions", "preemptions", "prefix", "drafts", "trace_time"):
        assert checked[name] == unchecked[name]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 0) for name in ("layers", "channels", "max_sequences", "max_step_tokens", "checkpoint_every")),
        ("slots", 1),
        ("width", 1),
        ("width", 9),
        ("draft_tokens", -1),
        ("seed", -1),
        ("checkpoint_every", 48),
        ("acceptance", -0.1),
        ("acceptance", 1.1),
        ("acceptance", float("nan")),
        ("patience", -1.0),
        ("step_ms", float("inf")),
        ("token_us", -1.0),
        ("dtype", "float64"),
        ("state_dtype", "int8"),
        ("layout", "rows"),
        ("resume", "never"),
    ],
)
def test_bad_options(name: str, value: object) -> None:
    with pytest.raises(ContractError) as caught:
        ReplayOptions(**{name: value})  # type: ignore[arg-type]
    assert caught.value.argument == name


def test_time_must_pass() -> None:
    with pytest.raises(ContractError, match="step_ms"):
        ReplayOptions(step_ms=0.0, token_us=0.0)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    requests, arrival = [], 0.0
    for index in range(draw(st.integers(1, 7))):
        arrival += draw(st.sampled_from((0.0, 0.0, 0.02, 1.0, 50.0)))
        hashed = draw(st.booleans())
        prompt = draw(st.integers(1, 1200) if hashed else st.integers(1, 40))
        block = st.integers(0, 1)
        blocks = draw(st.lists(block, min_size=-(-prompt // 512), max_size=-(-prompt // 512))) if hashed else ()
        requests.append(Request(index, arrival, prompt, draw(st.integers(0, 90)), tuple(blocks)))
    return Trace("made up", tuple(requests))


@st.composite
def options(draw: st.DrawFn) -> ReplayOptions:
    types = st.sampled_from(("bfloat16", "float16", "float32"))
    return ReplayOptions(
        layers=draw(st.integers(1, 2)),
        channels=draw(st.integers(1, 3)),
        width=draw(st.integers(2, 8)),
        dtype=draw(types),
        state_dtype=draw(st.none() | types),
        layout=draw(st.sampled_from(("channels", "positions"))),
        slots=draw(st.integers(2, 6)),
        max_sequences=draw(st.integers(1, 6)),
        max_step_tokens=draw(st.sampled_from((13, 100, 2000))),
        draft_tokens=draw(st.integers(0, 5)),
        acceptance=draw(st.sampled_from((0.0, 0.5, 0.9, 1.0))),
        token_us=draw(st.sampled_from((0.0, 50.0))),
        patience=draw(st.sampled_from((0.0, 0.1, 100.0))),
        resume=draw(st.sampled_from(("recompute", "import", "alternate"))),
        checkpoint_every=draw(st.sampled_from((1, 64, 512))),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=30)
@given(traces(), options())
def test_any_trace_with_any_options(trace: Trace, options: ReplayOptions) -> None:
    done: list[int] = []
    report = replay_trace(trace, options, done.append)
    assert report.mismatches == ()
    assert len(report.timeline.finished) == len(trace.requests)
    assert min(report.timeline.latency) > 0
    assert done == sorted(done)
    assert done[-1] == report.tokens
    assert report.timeline.live[-1] == 0
    assert report.slots_high_water <= min(options.slots - 1, options.max_sequences)
    assert max(map(sum, zip(report.timeline.live, report.timeline.cached, strict=True))) < options.slots
    # Rows stand, were rejected, or were computed again; prefixes make them fewer.
    rejected = report.drafts - report.drafts_accepted
    once = report.tokens - report.prefix_tokens_saved + rejected
    assert sum(report.rows.values()) >= once - report.resume_prefix_tokens
    if "recompute" not in report.preemptions:
        assert sum(report.rows.values()) == once
