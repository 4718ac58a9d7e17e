package session

// JanitorIdle says whether the goroutine that serves idle sessions has ended.
// It belongs to the bubble whose session started it: a simulation starts only
// when there is none.
func JanitorIdle() bool {
	janitor.Lock()
	defer janitor.Unlock()
	return janitor.timer == nil
}
