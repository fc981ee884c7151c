"""What is said about numbers and results, in text, HTML and plain data; nothing is computed here that a result does not
know.

`numbers`, `plain` and `layout` are pure and stand at the foot of the house. The other files say one kind of result each
and read it through what it offers; results do not import them (see `kinds`).
"""
