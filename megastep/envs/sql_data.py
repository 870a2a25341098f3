"""Small databases and questions for the environment `sql`.

    python -m megastep.envs.sql_data FOLDER [--databases 8] [--questions 512]
        [--demonstrations 128] [--seed 0]

writes FOLDER/databases/shop_0.sqlite, ..., FOLDER/train.jsonl, FOLDER/eval.jsonl and
FOLDER/demonstrations.jsonl. The questions of eval.jsonl are about the last database, the others
about the databases before it. All kinds of questions come in turn. A demonstration runs the right
query, looks at its rows and gives it as the solution.
"""

import argparse
import asyncio
import json
import sqlite3
from itertools import cycle, islice
from pathlib import Path
from random import Random

from megastep.envs.scripted import write_conversations
from megastep.envs.sql import SQL

FIRST_NAMES = "Ada Ben Cleo Dan Eve Finn Gus Hana Ivo Jana Kai Lena Mia Noor Otto".split()
CITIES = ("Aral", "Brena", "Corvo", "Delft", "Elm", "Fara")
PRODUCTS = ("lamp", "chair", "desk", "rug", "vase", "clock", "shelf", "mirror")
SCHEMA = """
CREATE TABLE customer (id INTEGER PRIMARY KEY, name TEXT, city TEXT);
CREATE TABLE product (id INTEGER PRIMARY KEY, name TEXT, price REAL);
CREATE TABLE purchase (id INTEGER PRIMARY KEY, customer_id INTEGER REFERENCES customer(id),
    product_id INTEGER REFERENCES product(id), amount INTEGER);
"""
# Question and query; {city}, {product}, {customer}, {number} and {few} are random.
QUESTIONS = (
    ("How many customers are there?", "SELECT count(*) FROM customer"),
    ("How many products are there?", "SELECT count(*) FROM product"),
    ("Which customers live in {city}?", "SELECT name FROM customer WHERE city = '{city}'"),
    ("How many customers live in {city}?", "SELECT count(*) FROM customer WHERE city = '{city}'"),
    ("Which customers do not live in {city}?", "SELECT name FROM customer WHERE city != '{city}'"),
    ("In which city does {customer} live?", "SELECT city FROM customer WHERE name = '{customer}'"),
    ("What is the price of a {product}?", "SELECT price FROM product WHERE name = '{product}'"),
    ("Which products cost more than {number}?", "SELECT name FROM product WHERE price > {number}"),
    ("Which products cost less than {number}?", "SELECT name FROM product WHERE price < {number}"),
    (
        "How many products cost more than {number}?",
        "SELECT count(*) FROM product WHERE price > {number}",
    ),
    (
        "How many products cost less than {number}?",
        "SELECT count(*) FROM product WHERE price < {number}",
    ),
    ("What is the highest price of a product?", "SELECT max(price) FROM product"),
    ("What is the lowest price of a product?", "SELECT min(price) FROM product"),
    ("What do the products cost on average?", "SELECT avg(price) FROM product"),
    (
        "List all products by price, the dearest first.",
        "SELECT name FROM product ORDER BY price DESC, name",
    ),
    (
        "In which cities do at least {few} customers live?",
        "SELECT city FROM customer GROUP BY city HAVING count(*) >= {few}",
    ),
    (
        "How many pieces of {product} were bought in total?",
        "SELECT sum(amount) FROM purchase JOIN product ON product.id = product_id "
        "WHERE product.name = '{product}'",
    ),
    (
        "Which customers bought a {product}? Name each once.",
        "SELECT DISTINCT customer.name FROM purchase JOIN customer ON customer.id = customer_id "
        "JOIN product ON product.id = product_id WHERE product.name = '{product}'",
    ),
    (
        "How much did the customers of {city} spend altogether?",
        "SELECT sum(amount * price) FROM purchase JOIN customer ON customer.id = customer_id "
        "JOIN product ON product.id = product_id WHERE city = '{city}'",
    ),
)


def write(folder: Path, databases: int, questions: int, seed: int) -> None:
    (folder / "databases").mkdir(parents=True, exist_ok=True)
    shops = []
    for i in range(databases):
        name = f"shop_{i}.sqlite"
        shops.append((name, _fill(folder / "databases" / name, Random(f"sql/{seed}/{i}"))))
    per_database = questions // databases
    _write_questions(folder / "train.jsonl", shops[:-1], per_database * (databases - 1), seed)
    _write_questions(folder / "eval.jsonl", shops[-1:], per_database, seed)


def write_demonstrations(folder: Path, count: int) -> None:
    """Of the first questions of train.jsonl, which must exist."""
    lines = (folder / "train.jsonl").read_text().splitlines()
    episodes = []
    for line in islice(cycle(lines), count):
        row = json.loads(line)
        turns = [f"<sql>{row['sql']}</sql>", f"<solution>{row['sql']}</solution>"]
        episodes.append((SQL(row, databases=str(folder / "databases")), turns))
    asyncio.run(write_conversations(folder / "demonstrations.jsonl", episodes))


def _write_questions(path: Path, shops: list[tuple[str, list[str]]], count: int, seed: int) -> None:
    """All kinds in turn, each about a random one of `shops`: a file name and its customers."""
    random = Random(f"sql/{seed}/{path.stem}")
    kinds = islice(cycle(QUESTIONS), count)
    rows = [_question(*kind, *random.choice(shops), random) for kind in kinds]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _fill(path: Path, random: Random) -> list[str]:
    """Returns the names of the customers."""
    path.unlink(missing_ok=True)
    with sqlite3.connect(path) as connection:
        connection.executescript(SCHEMA)
        people = random.sample(FIRST_NAMES, random.randint(8, len(FIRST_NAMES)))
        connection.executemany(
            "INSERT INTO customer (name, city) VALUES (?, ?)",
            [(name, random.choice(CITIES)) for name in people],
        )
        connection.executemany(
            "INSERT INTO product (name, price) VALUES (?, ?)",
            [(name, random.randint(100, 9999) / 100) for name in PRODUCTS],
        )
        connection.executemany(
            "INSERT INTO purchase (customer_id, product_id, amount) VALUES (?, ?, ?)",
            [
                (
                    random.randint(1, len(people)),
                    random.randint(1, len(PRODUCTS)),
                    random.randint(1, 5),
                )
                for _ in range(40)
            ],
        )
    connection.close()
    return people


def _question(
    question: str, sql: str, database: str, people: list[str], random: Random
) -> dict[str, str]:
    values = {
        "city": random.choice(CITIES),
        "product": random.choice(PRODUCTS),
        "customer": random.choice(people),
        "number": random.randint(10, 60),
        "few": random.randint(2, 3),
    }
    return {
        "question": question.format(**values),
        "database": database,
        "sql": sql.format(**values),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m megastep.envs.sql_data", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--databases", type=int, default=8, help="at least 2; the last is for evaluation"
    )
    parser.add_argument("--questions", type=int, default=512, help="over all databases")
    parser.add_argument(
        "--demonstrations", type=int, default=128, help="conversations for warm_start.data"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.databases < 2:
        parser.error(f"--databases {args.databases}: must be 2 or more, the last is for evaluation")
    if args.questions < args.databases:
        parser.error(f"--questions {args.questions}: must be one per database or more")
    if args.demonstrations < 1:
        parser.error(f"--demonstrations {args.demonstrations}: must be 1 or more")
    write(args.folder, args.databases, args.questions, args.seed)
    write_demonstrations(args.folder, args.demonstrations)
    print(f"{args.folder}: {args.databases} databases, train, eval and demonstrations.jsonl")


if __name__ == "__main__":
    main()
