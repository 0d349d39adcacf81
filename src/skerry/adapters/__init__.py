"""What makes a framework's model a set of parameters a learner can read, add to and write."""
