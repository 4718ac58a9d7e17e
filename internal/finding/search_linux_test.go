package finding

import (
	"context"
	"errors"
	"testing"
)

// A search whose time is up has not found that nobody is there: it has not asked all.
func TestSearchRunsOutOfTime(t *testing.T) {
	q := Search{At: Here(1)} // for which nobody has a name
	if err := q.Run(isUp{t.Context()}); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
}

// isUp is the context of an attempt whose time has ended while it asks.
type isUp struct{ context.Context }

func (isUp) Done() <-chan struct{} { return nil }
func (isUp) Err() error            { return context.DeadlineExceeded }
