package regcache

import "golang.org/x/sys/unix"

// mapMemory maps n bytes for an arena, which a forked child does not get. Otherwise the first write
// after the fork could give this process a new page while the device keeps the old one
// (ibv_fork_init(3)).
func mapMemory(n int) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, err
	}
	if err := unix.Madvise(b, unix.MADV_DONTFORK); err != nil {
		unix.Munmap(b)
		return nil, err
	}
	return b, nil
}

func unmapMemory(b []byte) error { return unix.Munmap(b) }
