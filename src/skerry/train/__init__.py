"""What a learner trains: a small model, its data and one inner step. The syncer imports none of this."""
