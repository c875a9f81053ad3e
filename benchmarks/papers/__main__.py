"""Write docs/results.md and its pictures: ``make results``."""

from . import mgwfbp

for m in (mgwfbp,):
    s = m.chapter()
    print(s.markdown)
    for x in s.sections:
        for n, c in x.pictures.items():
            c.save(f"/tmp/{n}.svg")
