"""Plans: what links, memory and disk a run needs, and what it would get, before anything is bought."""
