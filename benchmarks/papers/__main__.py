"""Write docs/results.md and its pictures: ``make results``."""

from . import mgwfbp_ring, mgwfbp_messages, mgwfbp_trees

for m in (mgwfbp_ring, mgwfbp_messages, mgwfbp_trees):
    s = m.section()
    print(s.markdown)
    for n, c in s.pictures.items():
        c.save(f"/tmp/{n}.svg")
