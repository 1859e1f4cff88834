"""Greetings, questions about the model, remembering a name, and saying what it cannot do; no held-out problems."""

import random

from train.tasks.arithmetic import addition, subtraction
from train.tasks.problem import Problem, is_held_out

SKILLS = "I can add, subtract, compare, reverse and copy text, and count letters."
WHO = "I am nano, a very small Kimi K3 model."
TALK = (  # what users say, the reasoning, the answer
    (
        ("hello", "hi", "hey", "Hello!", "Hi!", "Hi there", "Good morning", "Hello nano"),
        "A greeting.", "Hello! How can I help?",
    ),
    (
        ("Who are you?", "What are you?", "who are you", "What model are you?", "What is your name?"),
        "About me.", WHO,
    ),
    (
        ("What can you do?", "Help", "help", "What do you know?", "How can you help?", "What are you good at?"),
        "About me.", SKILLS,
    ),
    (("thanks", "Thank you", "Thank you!", "thx", "Great, thanks"), "Thanks.", "You are welcome!"),
    (("bye", "Goodbye", "Bye!", "See you"), "A farewell.", "Goodbye!"),
    (("How are you?", "how are you", "How is it going?"), "A greeting.", "I am fine. How can I help?"),
    (("ok", "Good", "Nice", "cool", "Great!", "I see"), "Nothing is asked.", "What shall I do next?"),
    (("test", "Test", "ping"), "A test.", "I am here."),
)  # fmt: skip
BEYOND = (
    "Tell me a joke", "Write a poem", "Write a poem about the sea.", "What is the capital of France?", "Who is he?",
    "What is the weather today?",
    "Translate this to French", "Explain gravity", "Write a story", "What time is it?",
    "Why is the sky blue?", "Write a program", "Write Python code", "Draw a cat", "Sing a song", "What is love?",
    "Tell me something", "What is machine learning?", "Summarize this text", "Who won the game?", "Plan my day",
    "What should I eat?", "Give me advice", "How old are you?", "Where do you live?", "Solve this", "Say it in German",
    "Sort 3 1 2", "What day is it?", "Bonjour", "Count to ten", "What is pi?", "Is it raining?", "Open the door",
    "Find x", "How do I cook rice?", "Who made you?", "Tell me a story about dragons", "What is the largest planet?",
    "Do you like music?", "Fix my code", "What is a prime number?", "List three fruits", "Is the earth round?",
    "Make a table", "How far is the moon?", "What does this mean?", "Can you see me?", "Play a game", "Are you human?",
    "Guess a number", "What is the meaning of life?", "Teach me to swim", "Why?", "Explain attention",
)  # fmt: skip
NAMES = (
    "Ada", "Alan", "Alice", "Ana", "Ben", "Bob", "Carl", "Clara", "Dan", "Emma", "Eva", "Finn", "Grace", "Hugo", "Ida",
    "Ivan", "Jack", "Jane", "Kim", "Leo", "Lena", "Maria", "Max", "Mia", "Nina", "Noah", "Olga", "Omar", "Paul", "Rosa",
    "Sam", "Sara", "Tim", "Tom", "Uma", "Vera", "Yuki", "Zoe",
)  # fmt: skip


def talk(rng: random.Random) -> Problem:
    if rng.random() < 0.3:
        user = rng.choice(BEYOND)
        return _said(user, "I am too small for that.", f"I am too small for that. {SKILLS}")
    users, reasoning, answer = rng.choice(TALK)
    return _said(rng.choice(users), reasoning, answer)


def remember(rng: random.Random) -> list[Problem]:
    """Two turns: a name is given, then asked for."""
    name = rng.choice(NAMES)
    given = _said(
        rng.choice(("My name is {}.", "I am {}.", "my name is {}", "I'm {}")).format(name),
        f"The name is {name}.",
        f"Hello {name}!",
    )
    asked = _said(
        rng.choice(("What is my name?", "Who am I?", "what's my name?")),
        f"The name is {name}.",
        f"Your name is {name}.",
    )
    return [given, asked]


def follow_up(rng: random.Random, before: int) -> Problem | None:
    """A sum that continues from the last result; None when the drawn one is held out."""
    n = rng.randrange(1, 100)
    if rng.random() < 0.5:
        user = rng.choice(("Now add {}.", "Add {} to that.", "plus {}", "And {} more?", "+{}", "and plus {}?")).format(
            n
        )
        problem = addition(before, n, user, "chat")
    else:
        user = rng.choice(("Now subtract {}.", "Take {} from that.", "minus {}", "-{}", "and minus {}?")).format(n)
        problem = subtraction(before, n, user, "chat")
    return None if is_held_out(problem.key) else problem


def _said(user: str, reasoning: str, answer: str) -> Problem:
    return Problem(task="chat", key=f"chat {user}", user=user, answer=answer, reasoning=reasoning)
