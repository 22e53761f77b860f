"""Inner optimization of simulated language models."""

from sim.learning import LanguageModelLearner
from sim.lm.language import training


def test_a_learners_numbers_are_those_of_its_training():
    learner = LanguageModelLearner(kind="lm", optimizer="muon", learning_rate=0.02, weight_decay=0.3, schedule="wsd")
    made = training(learner, run_tokens=1_000, fold=2)
    assert (made.optimizer, made.learning_rate, made.weight_decay, made.schedule) == ("muon", 0.02, 0.3, "wsd")
    assert (made.warmup_tokens, made.sequences_per_step) == (50, 8)
