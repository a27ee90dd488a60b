"""A page to print: all cards of a topic with their answers, on one side."""

from jinja2 import Environment

from course.lab24_interview import deck

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title><style>
 @page { size: A4; margin: 12mm } body { font: 8.5pt/1.25 sans-serif; columns: 2; column-gap: 8mm; margin: 0 }
 h1 { font-size: 13pt; column-span: all; margin: 0 0 3mm } div { break-inside: avoid; margin: 0 0 2mm }
 b { display: block } i { color: #555 }
</style></head><body><h1>{{ title }}</h1>
{% for card in cards %}<div><b>{{ card.question }}</b>{{ card.answer }} <i>{{ card.proof }}</i></div>
{% endfor %}</body></html>
"""


def page(topic: str) -> str:
    """HTML of the topic's sheet."""
    cards = deck.of_topic(topic)
    names = ", ".join(dict.fromkeys(card.topic for card in cards))
    return Environment(autoescape=True).from_string(_PAGE).render(title=f"minillm: {names}", cards=cards)
