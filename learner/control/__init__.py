"""The learner of a control run: fragments in, updates of policy, critic and whatever else is trained.

shard ─► Method.prepare ─► Batch ─► for each part: Method.loss ─► backward ─► one all_reduce ─► AdamW ─► Method.finish
         (ppo.py, grpo.py, distillation.py)      - domain.py --------------------------------------
"""
