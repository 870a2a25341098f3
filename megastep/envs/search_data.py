"""A small corpus of an invented country and questions about it, for the environment `search`.

    python -m megastep.envs.search_data FOLDER [--people 60] [--questions 256] [--seed 0]

writes FOLDER/corpus.jsonl, FOLDER/train.jsonl and FOLDER/eval.jsonl. Half of the questions need one
search, half need two. The people in eval.jsonl are not in train.jsonl.
"""

import argparse
import json
from pathlib import Path
from random import Random

SYLLABLES = "ba co di fe gu ha jo ki lu mo na pe ri so tu ve".split()
TRADES = ("painter", "baker", "sailor", "judge", "singer", "farmer", "doctor", "poet")
CITIES = 12
RIVERS = 6
EVAL_EVERY = 8  # every eighth person is for evaluation


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
        one_search = {"question": f"In which city was {person} born?", "answers": [city]}
        two_searches = {
            "question": f"On which river lies the city where {person} was born?",
            "answers": [river_of[city]],
        }
        split = "eval" if number % EVAL_EVERY == 0 else "train"
        rows[split].append(random.choice([one_search, two_searches]))
    for split, split_rows in rows.items():
        _write_lines(folder / f"{split}.jsonl", split_rows)


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
    parser.add_argument("--people", type=int, default=60)
    parser.add_argument("--questions", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write(args.folder, args.people, args.questions, args.seed)
    print(f"{args.folder}: corpus.jsonl, train.jsonl, eval.jsonl")


if __name__ == "__main__":
    main()
