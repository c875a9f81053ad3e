"""Every habit of people who train with torch's wrapper that we know of, by name."""

import habits_of_mistakes
import habits_of_models
import habits_of_one_rank
import habits_of_passes
import habits_of_scripts

THEMES = (
    habits_of_models,
    habits_of_passes,
    habits_of_one_rank,
    habits_of_scripts,
    habits_of_mistakes,
)
HABITS = {habit.__name__: habit for theme in THEMES for habit in theme.HABITS}
