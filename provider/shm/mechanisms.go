package shm

// A Mechanism is something of the kernel's that this provider uses.
type Mechanism struct {
	Name     string
	Required bool   // there are no connections without it
	Use      string // what it is for, or what is lost without it
	Err      error  // why this process cannot use it; nil: it can
}
