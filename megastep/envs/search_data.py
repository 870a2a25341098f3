"""A small corpus of an invented country and questions about it, for the environment `search`.

    python -m megastep.envs.search_data FOLDER [--people 200] [--questions 512]
        [--demonstrations 128] [--seed 0]

writes FOLDER/corpus.jsonl, FOLDER/train.jsonl, FOLDER/eval.jsonl and FOLDER/demonstrations.jsonl.
Half of the questions need one search, half need two. The people in eval.jsonl are in none of the
others. A demonstration makes the searches that its question needs and answers it.
"""

import argparse
import asyncio
import json
import re
from pathlib import Path
from random import Random

from megastep.envs.retrieval import application, listening, read_corpus
from megastep.envs.scripted import write_conversations
from megastep.envs.search import Search

SYLLABLES = "ba co di fe gu ha jo ki lu mo na pe ri so tu ve".split()
TRADES = ("painter", "baker", "sailor", "judge", "singer", "farmer", "doctor", "poet")
CITIES = 12
RIVERS = 6
EVAL_EVERY = 8  # every eighth person is for evaluation
MIN_QUESTIONS = 64  # so that both splits have some
BORN = "In which city was {person} born?"
RIVER = "On which river lies the city where {person} was born?"


def write(folder: Path, people: int, questions: int, seed: int) -> None:
    random = Random(f"search/{seed}")
    names = _names(random, people + CITIES + RIVERS)
    rivers = names[:RIVERS]
    cities = names[RIVERS : RIVERS + CITIES]
    persons = names[RIVERS + CITIES :]
    river_of = {city: random.choice(rivers) for city in cities}
    born = {person: random.choice(cities) for person in persons}
    passages = [f"{city} is a city on the river {river_of[city]}." for city in cities]
    passages += [
        f"{p} is a {random.choice(TRADES)} who was born in the city of {born[p]}." for p in persons
    ]
    folder.mkdir(parents=True, exist_ok=True)
    _write_lines(
        folder / "corpus.jsonl", [{"id": i, "contents": text} for i, text in enumerate(passages)]
    )
    rows: dict[str, list[dict]] = {"train": [], "eval": []}
    for _ in range(questions):
        number = random.randrange(people)
        person = persons[number]
        city = born[person]
        one_search = {"question": BORN.format(person=person), "answers": [city]}
        two_searches = {"question": RIVER.format(person=person), "answers": [river_of[city]]}
        split = "eval" if number % EVAL_EVERY == 0 else "train"
        rows[split].append(random.choice([one_search, two_searches]))
    for split, split_rows in rows.items():
        _write_lines(folder / f"{split}.jsonl", split_rows)


def write_demonstrations(folder: Path, count: int, seed: int) -> None:
    """Of questions of train.jsonl, which must exist, on a retrieval server of the corpus."""
    lines = (folder / "train.jsonl").read_text().splitlines()
    questions = [json.loads(line) for line in lines]
    corpus = read_corpus(folder / "corpus.jsonl")
    text = " ".join(passage["contents"] for passage in corpus.passages)
    random = Random(f"search/{seed}/demonstrations")
    rows = [random.choice(questions) for _ in range(count)]

    async def run() -> None:
        runner, url = await listening(application(corpus), "127.0.0.1", 0)
        try:
            episodes = [(Search(row, url=url), _turns(row, text)) for row in rows]
            await write_conversations(folder / "demonstrations.jsonl", episodes)
        finally:
            await runner.cleanup()

    asyncio.run(run())


def _turns(row: dict, text: str) -> list[str]:
    """The searches that the question needs, then the answer; `text`: all passages."""
    (answer,) = row["answers"]
    person = re.search(r"([A-Z]\w+)(?: was)? born", row["question"])
    assert person is not None, row
    turns = [f"<search>{person[1]} born city</search>"]
    if row["question"] == RIVER.format(person=person[1]):
        city = re.search(rf"{person[1]} is a \w+ who was born in the city of (\w+)\.", text)
        assert city is not None, row
        turns.append(f"<search>{city[1]} city river</search>")
    return [*turns, f"<answer>{answer}</answer>"]


def _names(random: Random, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(random.choices(SYLLABLES, k=3)).capitalize()] = None
    return list(names)


def _write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m megastep.envs.search_data", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--people", type=int, default=200)
    parser.add_argument("--questions", type=int, default=512)
    parser.add_argument(
        "--demonstrations", type=int, default=128, help="conversations for warm_start.data"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.people < EVAL_EVERY:
        parser.error(f"--people {args.people}: must be {EVAL_EVERY} or more")
    if args.questions < MIN_QUESTIONS:
        parser.error(f"--questions {args.questions}: must be {MIN_QUESTIONS} or more")
    if args.demonstrations < 1:
        parser.error(f"--demonstrations {args.demonstrations}: must be 1 or more")
    write(args.folder, args.people, args.questions, args.seed)
    write_demonstrations(args.folder, args.demonstrations, args.seed)
    print(f"{args.folder}: corpus, train, eval and demonstrations.jsonl")


if __name__ == "__main__":
    main()
