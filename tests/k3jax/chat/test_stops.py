import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from k3jax.chat.stops import StopStrings

WORD = st.text("ab", min_size=1, max_size=5)


@given(text=st.text("ab", max_size=30), stops=st.lists(WORD, max_size=4))
@example(text="aaab", stops=["aab"])
@example(text="aabaaabaaab", stops=["aabaaab", "aabaaac"])
@example(text="abcd", stops=["abcde", "bc"])
def test_every_prefix_against_its_definition(text, stops):
    """Sent is all but the longest suffix that begins a stop string, until the first stop string is complete."""
    matcher, sent = StopStrings(stops), ""
    for end in range(1, len(text) + 1):
        sent += matcher.feed(text[end - 1])
        seen = text[:end]
        complete = [stop for stop in stops if seen.endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            assert (matcher.matched, sent) == (longest, seen[: -len(longest)])
            assert matcher.feed("more") == matcher.flush() == ""
            break
        begun = [size for stop in stops for size in range(len(stop)) if seen.endswith(stop[:size])]
        assert (matcher.matched, sent) == (None, seen[: end - max(begun, default=0)])
    else:
        sent += matcher.flush()
        assert sent == text
    whole = StopStrings(stops)
    assert whole.feed(text) + whole.flush() == sent
    assert whole.matched == matcher.matched


def test_text_after_a_flush_is_matched_on_its_own():
    matcher = StopStrings("three")
    assert matcher.feed("one th") == "one "
    assert matcher.flush() == "th"
    assert matcher.feed("ree, three") == "ree, "


def test_empty_stop_string():
    with pytest.raises(ValueError, match="empty string"):
        StopStrings(["a", ""])
