"""The course: a folder per lab, from which `python -m minillm notebooks` builds labs/ and solutions/."""
