"""Planning: turns a model, a batch and a budget into a plan, or into a refusal that says what to change."""
