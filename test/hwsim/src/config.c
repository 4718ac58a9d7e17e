// The configuration: HWSIM=PATH?KEY=VALUE,KEY=VALUE… See the README for the keys.
#include "hwsim.h"

struct config config;

enum { US = 1000, MS = 1000 * US };
#define UNSET UINT64_MAX

static const struct {
	const char *key;
	uint64_t *word;
	uint64_t unit;
} words[] = {
	{"seed", &config.seed, 1},
	{"jitter_us", &config.jitter_ns, US},
	{"kernel_us", &config.kernel_ns, US},
	{"flush_ms", &config.flush_ns, MS},
	{"timewait_ms", &config.timewait_ns, MS},
	{"cm_timeout_ms", &config.cm_timeout_ns, MS},
	{"latency_ns", &config.latency_ns, 1},
	{"bandwidth", &config.bytes_per_s, 1},
	{"max_mr_size", &config.max_mr_size, 1},
	{"max_msg_sz", &config.max_msg_sz, 1},
};

static const struct {
	const char *key;
	enum cost kind;
} costs[] = {
	{"reg_ns", COST_REG}, {"reg_ps", COST_REG_BYTE_PS}, {"dereg_ns", COST_DEREG}, {"bind_ns", COST_BIND},
	{"qp_ns", COST_QP}, {"slow_qp_ns", COST_SLOW_QP}, {"wake_ns", COST_WAKE},
};

static const struct {
	const char *key;
	unsigned *number;
} numbers[] = {
	{"cm_retries", &config.cm_retries},
	{"lost_rtu", &config.lost_rtu},
	{"cm_loss", &config.cm_loss},
	{"dreq_loss", &config.dreq_loss},
	{"loss", &config.loss},
	{"sm_loss", &config.sm_loss},
};

static const struct {
	const char *key;
	bool *on;
} switches[] = {
	{"calm", &config.calm},
	{"silent", &config.silent},
	{"costs", &config.costs},
	{"no_copy", &config.no_copy},
	{"grh", &config.grh},
	{"mw_past_end", &config.mw_past_end},
	{"mw_any_qp", &config.mw_any_qp},
	{"mw_late", &config.mw_late},
	{"mw_returned", &config.mw_returned},
	{"fork_needed", &config.fork_needed},
};

static const struct {
	const char *key;
	enum count kind;
} limits[] = {
	{"max_pd", N_PD}, {"max_mr", N_MR}, {"max_mw", N_MW}, {"max_cq", N_CQ}, {"max_qp", N_QP}, {"max_srq", N_SRQ},
};

static bool set(const char *key, const char *value)
{
	uint64_t n = strtoull(value, NULL, 0);
	size_t i;

	if (!strcmp(key, "profile"))
		return (config.profile = find_profile(value)) != NULL;
	if (!strcmp(key, "limit_errno"))
		return config.limit_errno = n, true;
	for (i = 0; i < sizeof words / sizeof *words; i++)
		if (!strcmp(key, words[i].key))
			return *words[i].word = n * words[i].unit, true;
	for (i = 0; i < sizeof costs / sizeof *costs; i++)
		if (!strcmp(key, costs[i].key))
			return config.cost[costs[i].kind] = n, true;
	for (i = 0; i < sizeof numbers / sizeof *numbers; i++)
		if (!strcmp(key, numbers[i].key))
			return *numbers[i].number = n, true;
	for (i = 0; i < sizeof switches / sizeof *switches; i++)
		if (!strcmp(key, switches[i].key))
			return *switches[i].on = n, true;
	for (i = 0; i < sizeof limits / sizeof *limits; i++)
		if (!strcmp(key, limits[i].key))
			return config.limit[limits[i].kind] = n, true;
	return false;
}

// set_costs sets the profile's costs where no others are set, and no costs if they are
// switched off.
static void set_costs(void)
{
	for (int i = 0; i < N_COSTS; i++) {
		if (!config.timed || !config.costs)
			config.cost[i] = 0;
		else if (config.cost[i] == UNSET)
			config.cost[i] = config.profile->cost[i];
	}
}

// An unknown key ends the program: otherwise a test would run on another device than it was
// written for.
int read_config(void)
{
	const char *env = getenv("HWSIM");
	char copy[1024], *rest = copy, *word, *value;

	config = (struct config){
		.profile = find_profile("mlx5-roce"),
		.jitter_ns = 30 * US, .flush_ns = 3 * MS, .kernel_ns = 50 * US,
		.timewait_ns = 20 * MS, .cm_timeout_ns = 50 * MS,
		.cm_retries = 15, // drivers/infiniband/core/cma.c: CMA_MAX_CM_RETRIES
		.bytes_per_s = 50000000000, .costs = true,
		.max_mr_size = UINT64_MAX, .max_msg_sz = 1 << 30,
	};
	for (int i = 0; i < N_COSTS; i++)
		config.cost[i] = UNSET;
	if (!env || strlen(env) >= sizeof copy)
		return ENOENT;
	strcpy(copy, env);
	word = strsep(&rest, "?");
	if (strlen(word) >= sizeof config.path)
		return ENAMETOOLONG;
	strcpy(config.path, word);
	while ((word = strsep(&rest, ","))) {
		if (!*word)
			continue;
		value = strchr(word, '=');
		if (value)
			*value++ = 0;
		if (!set(word, value ? value : "1")) {
			fprintf(stderr, "hwsim: HWSIM: %s=%s is not known\n", word, value ? value : "1");
			exit(2);
		}
	}
	if (config.profile->transport == IBV_TRANSPORT_IWARP)
		config.loss = 0; // TCP repeats what is lost
	config.timed = config.latency_ns > 0;
	set_costs();
	config.no_copy &= config.timed;
	config.calm |= config.timed;
	return 0;
}

int limit_of(enum count kind)
{
	const struct profile *p = config.profile;

	if (config.limit[kind])
		return config.limit[kind];
	switch (kind) {
	case N_PD: return p->max_pd;
	case N_MR: return p->max_mr;
	case N_MW: return p->max_mw;
	case N_CQ: return p->max_cq;
	case N_QP: return p->max_qp;
	case N_SRQ: return p->max_srq;
	default: return 1 << 30;
	}
}
