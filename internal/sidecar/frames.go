package sidecar

import (
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/internal/sidecar/sidecarpb"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
)

// readRequest reads the body of a frame.
func readRequest(body []byte) (*sidecarpb.Request, error) {
	q := new(sidecarpb.Request)
	if err := proto.Unmarshal(body, q); err != nil {
		return nil, fmt.Errorf("%w: %w", wire.ErrFrame, err)
	}
	if q.What == nil {
		return nil, fmt.Errorf("%w: request %d is none that this version knows", wire.ErrFrame, q.Id)
	}
	if q.Id == 0 {
		return nil, fmt.Errorf("%w: a request with the number 0", wire.ErrFrame)
	}
	return q, nil
}
