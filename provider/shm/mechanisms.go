package shm

// A Mechanism is a feature of the kernel that this provider uses.
type Mechanism struct {
	Name     string
	Required bool   // without it no connection is possible
	Use      string // what it is for, and what replaces it
	Err      error  // why this process cannot use it; or nil
}
