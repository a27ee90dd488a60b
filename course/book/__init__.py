"""The course as a website: `make book` builds build/book/html, which also works from file://.

    __main__.py    write every page, then run Sphinx over them
    pages.py       which pages there are, from the repository's own texts
    lab_page.py    a lab: text, stubs with hints and solution folded beneath, outputs stored in solutions/
    reference.py   API and commands, from docstrings and options
    conf.py        Sphinx: theme, formulas as MathML, docstrings

Nothing is executed and nothing is measured here: outputs are those of the committed solutions.
"""
