// Pinning the pages of a memory region, as the kernel does (ib_umem_get in
// drivers/infiniband/core/umem.c).
#include "hwsim.h"

#include <linux/capability.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

static _Atomic uint64_t pinned; // bytes, in whole pages: a page counts with each region that has a part of it

static uint64_t pages(const void *addr, size_t n, uintptr_t *begin)
{
	uintptr_t page = sysconf(_SC_PAGESIZE);

	*begin = (uintptr_t)addr & -page;
	return (((uintptr_t)addr + n + page - 1) & -page) - *begin;
}

// exempt: the limit does not apply to a process with CAP_IPC_LOCK in the initial user
// namespace (PROC_USER_INIT_INO).
static bool exempt(void)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct caps[2];
	struct stat s;

	return !syscall(SYS_capget, &header, caps) && caps[0].effective & 1 << CAP_IPC_LOCK &&
		(stat("/proc/self/ns/user", &s) || s.st_ino == 0xEFFFFFFD);
}

// faults_in reports whether each page is mapped and readable, and if needed writable. Kernels
// before 5.14 cannot tell. If operations must cost no time, it does not look.
static bool faults_in(uintptr_t begin, uint64_t n, bool writes)
{
	static _Alignas(4096) char own[4096];
	int advice = writes ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;

	if (config.timed && !config.costs)
		return true;
	return !madvise((void *)begin, n, advice) || madvise(own, sizeof own, advice);
}

int pin(void *addr, size_t n, int access)
{
	// ib_access_writable
	const int writes = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND;
	struct rlimit limit = {RLIM_INFINITY};
	uintptr_t begin;
	uint64_t bytes = pages(addr, n, &begin), now = atomic_fetch_add(&pinned, bytes) + bytes;
	int failed = 0;

	getrlimit(RLIMIT_MEMLOCK, &limit);
	if (now > limit.rlim_cur && !exempt())
		failed = ENOMEM;
	else if (!faults_in(begin, bytes, access & writes))
		failed = EFAULT;
	if (failed)
		atomic_fetch_sub(&pinned, bytes);
	return failed;
}

void unpin(void *addr, size_t n)
{
	uintptr_t begin;

	atomic_fetch_sub(&pinned, pages(addr, n, &begin));
}
