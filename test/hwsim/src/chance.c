// Random numbers, from the seed, and time. Each process has its own sequence.
#include "hwsim.h"

#include <time.h>

uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t); // the same for all processes of the host
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

// recent_ns returns, in timed mode, the time of the device's last look at the clock, because a
// look costs too much.
uint64_t recent_ns(void) { return config.timed ? hw.now : now_ns(); }

// splitmix64
uint64_t chance(uint64_t below)
{
	static uint64_t state;
	uint64_t z;

	if (!state)
		state = config.seed * 0x9e3779b97f4a7c15 + self * 0x2545f4914f6cdd1d + 1;
	z = state += 0x9e3779b97f4a7c15;
	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
	z = (z ^ z >> 27) * 0x94d049bb133111eb;
	z ^= z >> 31;
	return below ? z % below : 0;
}

// Most events are soon; one in 32 may take the whole time.
uint64_t late(uint64_t most)
{
	if (config.calm || !most)
		return 0;
	return now_ns() + chance(chance(32) ? most / 8 + 1 : most + 1);
}
