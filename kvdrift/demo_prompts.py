"""Word problems for the demo: short, with one whole number as the answer, written for kvdrift."""

from __future__ import annotations

DEMO_PROMPTS: tuple[str, ...] = (
    "Question: A baker packs 6 rolls into every bag. She fills 14 bags in the morning and 9 bags in the "
    "afternoon. How many rolls does she pack that day?\nAnswer:",
    "Question: Ilse has 45 marbles. She gives 7 to each of her 4 cousins and then finds 12 more under the "
    "sofa. How many marbles does she have now?\nAnswer:",
    "Question: A ferry carries 38 cars on each crossing. It crosses 5 times on Saturday and 3 times on "
    "Sunday. How many cars does it carry over the weekend?\nAnswer:",
    "Question: Tomas reads 22 pages on every school day and 40 pages on each day of the weekend. How many "
    "pages does he read in one week?\nAnswer:",
    "Question: A garden has 8 rows of 15 tulips. A storm breaks one third of them. How many tulips are "
    "still standing?\nAnswer:",
    "Question: A roll of cloth is 60 metres long. A tailor cuts 4 curtains of 9 metres and 2 tablecloths of "
    "5 metres from it. How many metres are left?\nAnswer:",
    "Question: Priya saves 18 coins a month for half a year and spends 35 of them on a gift. How many coins "
    "are left?\nAnswer:",
    "Question: A theatre has 24 rows with 16 seats each. On Friday, 57 seats stay empty. How many people "
    "watch the play?\nAnswer:",
)
"""Word problems, as a base model reads them."""

DEMO_ANSWERS: tuple[int, ...] = (138, 29, 304, 190, 80, 14, 73, 327)
"""The number that answers each of them."""
