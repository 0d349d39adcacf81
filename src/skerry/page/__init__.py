"""What people look at while a run goes: a page that is served beside the syncer, and the same numbers for machines."""
