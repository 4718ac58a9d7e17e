package regcache

import (
	"math"
	"testing"
	"testing/fstest"
)

func TestMemoryLimitIsTheControlGroups(t *testing.T) {
	const v1, v2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"
	for _, tc := range []struct {
		name   string
		groups string
		files  map[string]string
		want   int64
	}{
		{"no control groups", "", nil, math.MaxInt64},
		{"version 2, its own root", "0::/\n", map[string]string{v2 + "/memory.max": "134217728\n"}, 128 << 20},
		{"version 2, as the host sees it", "0::/a/b\n", map[string]string{v2 + "/a/b/memory.max": "134217728\n"}, 128 << 20},
		{"version 2, of a group above", "0::/a/b\n", map[string]string{v2 + "/a/b/memory.max": "max\n", v2 + "/a/memory.max": "1000\n"}, 1000},
		{"version 2, the smallest of all", "0::/a/b\n", map[string]string{v2 + "/a/b/memory.max": "10\n", v2 + "/a/memory.max": "1000\n"}, 10},
		{"version 2, none", "0::/a\n", map[string]string{v2 + "/a/memory.max": "max\n"}, math.MaxInt64},
		{"version 2, throttled", "0::/a\n", map[string]string{v2 + "/a/memory.max": "max\n", v2 + "/a/memory.high": "1000\n"}, 1000},
		{"version 2, throttled above", "0::/a/b\n", map[string]string{v2 + "/a/b/memory.max": "3000\n", v2 + "/a/memory.high": "2000\n"}, 2000},
		{"version 1, as the host sees it", "5:cpu,memory:/docker/1\n3:cpuset:/\n", map[string]string{v1 + "/docker/1/memory.limit_in_bytes": "1000\n"}, 1000},
		{"version 1, mounted as its own root", "5:memory:/docker/1\n", map[string]string{v1 + "/memory.limit_in_bytes": "1000\n"}, 1000},
		{"another controller", "5:cpu:/a\n", map[string]string{v1 + "/a/memory.limit_in_bytes": "1000\n"}, math.MaxInt64},
		{"nonsense", "memory\n::\n0::../../x\n", nil, math.MaxInt64},
	} {
		root := fstest.MapFS{"proc/self/cgroup": {Data: []byte(tc.groups)}}
		for name, text := range tc.files {
			root[name] = &fstest.MapFile{Data: []byte(text)}
		}
		if got := groupLimit(root); got != tc.want {
			t.Errorf("%s: %d, want %d", tc.name, got, tc.want)
		}
	}
}
