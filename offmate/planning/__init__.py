"""Planning: the road from a model, a batch and a budget to a plan, or to a refusal that says what to change."""
