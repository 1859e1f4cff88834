"""Reversing, copying and counting letters; the reasoning spells the string out."""

import random
import string

from train.tasks.problem import Problem, vary

REVERSE = (
    "Reverse {s}", "Reverse {s}.", "reverse: {s}", "Reverse the string {s}.", "Spell {s} backwards.",
    "Write {s} backwards.", 'Reverse "{s}"', "What is {s} reversed?",
)  # fmt: skip
COPY = (
    "Repeat {s}", "copy: {s}", "Copy {s}", "Say {s}", "Repeat after me: {s}", 'Say "{s}"', "Echo {s}", "Write {s}",
)  # fmt: skip
COUNT = (
    "How many {c} in {s}?", "How many times does {c} occur in {s}?", "Count the letter {c} in {s}.", "count {c}: {s}",
    "How often is {c} in {s}?", "How many {c}'s are in {s}?",
)  # fmt: skip
WORDS = tuple(
    """apple banana bread butter cake candy cherry cheese coffee cookie lemon melon onion orange pepper potato sugar
    tomato water honey bear bird camel cat dog duck eagle fish fox frog goat goose horse lion monkey mouse panda
    rabbit sheep snake spider tiger turtle whale wolf zebra cloud desert earth forest garden grass hill island lake
    leaf moon mountain ocean rain river rock sand sea snow star stone storm sun tree valley wind winter summer spring
    autumn book box chair clock door house kitchen ladder lamp letter mirror paper pencil phone picture pillow plate
    radio room spoon table ticket window yard arm bone brain ear eye face finger foot hair hand head heart knee leg
    mouth neck nose tooth black blue brown green grey pink purple red white yellow big cold dark deep early easy fast
    happy hard heavy high hot kind late light long loud new old quiet round short slow small smart soft strong sweet
    tall thin warm wide young add answer ask begin break bring build buy carry catch choose climb close cook count
    cross dance draw dream drink drive eat fall feed fill find fly follow forget give grow hear help hold jump keep
    kernel know laugh learn leave lend listen live look lose make meet model move number open paint pay play pull push
    put question read ride ring run school see sell send shake share sing sit sleep smile speak spell stand start stop
    strawberry street swim system take talk teach tell think throw town train travel turn visit wait wake walk want
    wash watch wear win word work world write hello mississippi tomorrow balloon committee puzzle letters""".split()
)


def reverse(rng: random.Random) -> Problem:
    s = _string(rng)
    return Problem(
        task="reverse",
        key=f"reverse {s}",
        user=vary(rng, REVERSE, s=s),
        answer=s[::-1],
        reasoning=f"{' '.join(s)}; {' '.join(s[::-1])}",
    )


def copy(rng: random.Random) -> Problem:
    parts = [rng.choice((_string, _word, _digits))(rng) for _ in range(rng.randint(1, 4))]
    s = " ".join(parts)
    return Problem(task="copy", key=f"copy {s}", user=vary(rng, COPY, s=s), answer=s, reasoning="Repeat it.")


def count(rng: random.Random) -> Problem:
    s = _string(rng)
    c = rng.choice(s) if rng.random() < 0.8 else rng.choice(string.ascii_lowercase)
    tally, seen = [], 0
    for letter in s:
        seen += letter == c
        tally.append(f"{letter}{seen}")
    return Problem(
        task="count", key=f"count {c} {s}", user=vary(rng, COUNT, c=c, s=s), answer=str(seen), reasoning=" ".join(tally)
    )


def _word(rng: random.Random) -> str:
    return rng.choice(WORDS)


def _digits(rng: random.Random) -> str:
    return "".join(rng.choices(string.digits, k=rng.randint(1, 4)))


def _string(rng: random.Random) -> str:
    """A word, or three to eight letters, from few letters (repeats) or from all."""
    if rng.random() < 0.3:
        return _word(rng)
    pool = string.ascii_lowercase if rng.random() < 0.6 else rng.sample(string.ascii_lowercase, 3)
    return "".join(rng.choices(pool, k=rng.randint(3, 8)))
