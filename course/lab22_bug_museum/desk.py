"""The game with buttons: choose an exhibit, order measurements, accuse, read the debrief."""

from typing import Any

from course.kit.card import Card, in_notebook, show_card
from course.lab22_bug_museum import museum
from course.lab22_bug_museum.game import visit


def desk(kind: str = "") -> None:
    """Buttons around `visit` for the exhibits of a kind, or of both; a list of them where there is no notebook."""
    names = [name for name, its in museum.EXHIBITS.items() if kind in ("", its.kind)]
    try:
        import ipywidgets
    except ImportError:
        ipywidgets = None
    if ipywidgets is None or not in_notebook():
        show_card(Card("The museum", "", None, (f'case = visit("{names[0]}") begins a case.', ", ".join(names))))
        return
    from IPython.display import display

    display(_Desk(ipywidgets, names).box)


class _Desk:
    """The widgets of one desk. case: the exhibit that is played."""

    def __init__(self, ipywidgets: Any, names: list[str]):
        self.widgets = ipywidgets
        self.choice = ipywidgets.Dropdown(options=names, description="exhibit")
        self.start = ipywidgets.Button(description="Begin", button_style="primary")
        self.controls, self.output = ipywidgets.VBox(), ipywidgets.Output()
        self.start.on_click(lambda _: self.begin())
        self.box = ipywidgets.VBox([ipywidgets.HBox([self.choice, self.start]), self.controls, self.output])

    def begin(self) -> None:
        """Another case: its card, a button for each measurement and each suspect."""
        self.case = visit(self.choice.value)
        measurements = [(f"{m.name}, {m.minutes} min", m.name) for m in self.case.exhibit.measurements]
        self.controls.children = [
            self._row("Order", [self._button(text, self.case.order, name) for text, name in measurements]),
            self._row("Accuse", [self._button(letter, self.case.accuse, letter) for letter in self.case.suspects]),
            self._row(
                "Close",
                [
                    self._button("Code", self.case.code),
                    self._button("Debrief", self.case.debrief),
                    self._button("Give up", self.case.debrief, True),
                ],
            ),
        ]
        self.output.clear_output()
        self._show(self.case)

    def _button(self, text: str, act: Any, *arguments: Any) -> Any:
        button = self.widgets.Button(description=text, layout=self.widgets.Layout(width="auto"))

        def pressed(_button: Any) -> None:
            try:
                shown = act(*arguments)
            except ValueError as error:
                shown = Card("Not possible", "", None, (str(error),))
            self._show(shown)

        button.on_click(pressed)
        return button

    def _row(self, label: str, buttons: list[Any]) -> Any:
        name = self.widgets.HTML(f"<b>{label}</b>", layout=self.widgets.Layout(width="70px"))
        wrapped = self.widgets.HBox(buttons, layout=self.widgets.Layout(flex_flow="row wrap"))
        return self.widgets.HBox([name, wrapped])

    def _show(self, thing: Any) -> None:
        from IPython.display import display

        with self.output:
            display(thing)
