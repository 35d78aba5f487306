"""Seeds of processes and environments."""

from actors.control.environments.seeds import batch_seed, environment_seeds, life_seed, process_seed


def test_run_name_and_life_of_a_process_each_give_another_seed():
    seeds = {
        process_seed(seed, name, salt)
        for seed in range(20)
        for name in ("actor0", "actor1", "probe")
        for salt in (0, 1)
    }
    assert len(seeds) == 20 * 3 * 2


def test_names_and_salts_cannot_be_mistaken_for_each_other():
    assert process_seed(1, "actor1", 2) != process_seed(1, "actor", 12)
    assert process_seed(1, "1", 1) != process_seed(11, "", 1)


def test_no_two_lives_of_a_process_have_the_same_seed_though_they_begin_at_one_step():
    seeds = {life_seed(0, "actor0", step, life) for step in range(30) for life in range(5)}
    assert len(seeds) == 30 * 5
    assert life_seed(0, "actor0", 0, 0) == process_seed(0, "actor0")


def test_the_same_arguments_give_the_same_seed_in_every_process():
    # int.from_bytes(sha256(b"(7, 'actor0', '0')").digest()[:8], "little") >> 2
    assert process_seed(7, "actor0") == process_seed(7, "actor0", 0) == 2412666449391151239
    assert process_seed(7, "actor0", "resumed-3") == process_seed(7, "actor0", "resumed-3")


def test_environments_of_a_process_have_different_seeds_that_every_generator_takes():
    seeds = environment_seeds(3, 1 << 17)  # so many that drawing without care repeats some: 2^17 squared / 2^33 = 2
    assert len(set(seeds)) == len(seeds)
    assert min(seeds) >= 0
    assert max(seeds) < 1 << 32
    assert environment_seeds(3, 5) == environment_seeds(3, 5) != environment_seeds(4, 5)


def test_a_seed_for_many_environments_at_once_fits_into_31_bits():
    seeds = [batch_seed(process_seed(0, f"actor{i}")) for i in range(1000)]
    assert len(set(seeds)) == 1000
    assert max(seeds) < 1 << 31
