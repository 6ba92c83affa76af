package bootstrap

import (
	"context"
	"errors"
)

// meetAtHost lets the ranks meet at a host and a port that all of them know in advance. Rank 0 may know only
// the port. Then host is "" there.
func (e *Env) meetAtHost(ctx context.Context, o MeetOptions, m *Place, host string) error {
	if o.Secret.IsZero() && !o.Insecure {
		return ErrNoSecret
	}
	if o.Port == 0 {
		return errors.New(noPort(host))
	}
	m.Secret, m.Reused = o.Secret, true
	if e.Rank != 0 {
		if e.OneHost() {
			host = loopback
		}
		return e.dial(ctx, o, m, host, o.Port)
	}
	if host == "" {
		var err error
		if host, err = e.announcedHost(o); err != nil {
			return err
		}
	}
	listen, err := e.listenHost(ctx, o, host)
	if err != nil {
		return err
	}
	_, err = e.serve(ctx, o, m, listen, o.Port)
	return err
}
