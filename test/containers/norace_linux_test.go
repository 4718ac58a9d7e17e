//go:build !race

package containers

const moreMemory = 1
