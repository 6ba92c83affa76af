package bootstrap

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/store"
	"github.com/gohvd/gohvd/store/c10d"
)

// torchSecretKey is the key under which rank 0 writes how the other ranks get the secret: the result of
// torchSecret. The value is never the secret itself, because anybody who can connect to the TCPStore can read
// the value.
const torchSecretKey = "secret"

// meetAtTorch meets at the TCPStore of torchrun's agent.
func (e *Env) meetAtTorch(ctx context.Context, o MeetOptions, m *Place) error {
	if o.Secret.IsZero() && !o.Insecure && !e.OneHost() {
		return ErrNoSecret
	}
	host, err := o.resolve(ctx, e.host)
	if err != nil {
		return err
	}
	addr := net.JoinHostPort(host, strconv.Itoa(e.port))
	client, err := c10d.Dial(ctx, addr, c10d.Unknown)
	if err != nil {
		return err
	}
	m.Addr = addr
	m.onClose(client.Close)
	// The agent's store outlives a program, and the next program that the same worker runs has the same job.
	prefix := "gohvd/" + e.JobID
	unsealed := store.NewPrefixStore(prefix, client)
	var word string
	if e.Rank == 0 {
		word, err = e.publishTorchSecret(ctx, o, m, unsealed)
	} else {
		word, err = e.awaitTorchSecret(ctx, o, m, unsealed)
	}
	// The values of other meetings are sealed with other secrets.
	for _, beginning := range []string{wordSocket, wordPrint} {
		if name, ok := strings.CutPrefix(word, beginning); ok {
			prefix += "/" + name
		}
	}
	m.Store = store.NewPrefixStore(prefix, sealed(client, m.Secret))
	return err
}

// publishTorchSecret sets the secret at rank 0, and publishes the word of torchSecret in s until all ranks
// have met.
func (e *Env) publishTorchSecret(ctx context.Context, o MeetOptions, m *Place, s store.Store) (word string,
	err error) {
	if word, err = e.torchSecret(o, m); err != nil {
		return "", err
	}
	m.removeWhenMet(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), lookupTime)
		defer cancel()
		_, err := s.Delete(ctx, torchSecretKey)
		return err
	})
	return word, s.Set(ctx, torchSecretKey, []byte(word))
}

// awaitTorchSecret sets the secret at a rank other than 0, and returns the word that rank 0 has published in
// s. The word may be that of an earlier program whose ranks have not met. So if no process hands over the
// secret, the word is read again.
func (e *Env) awaitTorchSecret(ctx context.Context, o MeetOptions, m *Place, s store.Store) (word string,
	err error) {
	var lost error // why s cannot be read
	err = dial.Retry(ctx, func() error {
		var text []byte
		if text, lost = s.Get(ctx, torchSecretKey); lost != nil {
			if word == "" || ctx.Err() == nil {
				return nil
			}
			// The time is over. The reason is why the word that was read before was of no use.
			err := lost
			lost = nil
			return err
		}
		word = string(text)
		return e.adoptTorchSecret(ctx, o, m, word)
	})
	return word, errors.Join(lost, err)
}

// adoptTorchSecret sets the secret at a rank other than 0. word is what torchSecret has returned at rank 0.
// It comes from a TCPStore, so another user of this host, or of another host, may have chosen it. If no
// process hands over the secret now, dial.MayRecover is true for the error.
func (e *Env) adoptTorchSecret(ctx context.Context, o MeetOptions, m *Place, word string) (err error) {
	if name, ok := strings.CutPrefix(word, wordSocket); ok {
		switch {
		case !o.Secret.IsZero():
			return errGivenToSome
		case !e.OneHost():
			return fmt.Errorf("rank 0 hands over the secret on its host, but only %d of %d ranks are on this host",
				e.LocalSize, e.Size)
		}
		if err := checkHandoverName(name); err != nil {
			return fmt.Errorf("malformed announcement from rank 0 about the secret: %w", err)
		}
		if m.Secret, err = takeOver(ctx, name); err != nil {
			return fmt.Errorf("getting the secret from rank 0: %w", err)
		}
		m.Secret = o.encrypted(m.Secret)
		return nil
	}
	if print, ok := strings.CutPrefix(word, wordPrint); ok {
		if m.Secret, err = o.secretFor(wordGiven); err == nil && print != fingerprint(m.Secret) {
			err = errors.New("rank 0 was given another secret: give all ranks the same file in HVD_SECRET_FILE")
		}
		return err
	}
	if word != wordNone {
		return fmt.Errorf("malformed announcement from rank 0 about the secret: got %d bytes, want \"given:\" and a fingerprint, \"none\" or the name of a socket", len(word))
	}
	if !o.Insecure {
		return ErrNoSecret
	}
	m.Secret, err = o.secretFor(word)
	return err
}

// fingerprint returns a text that differs between secrets. It does not tell the secret.
func fingerprint(s secret.Secret) string { return hex.EncodeToString(s.Seal(torchSecretKey, nil)[:8]) }

// torchSecret sets the secret at rank 0. It returns the word that rank 0 must publish and that the other
// ranks pass to adoptTorchSecret: wordPrint and the fingerprint of the secret that the user has given,
// wordNone, or wordSocket and the name of a socket at which rank 0 hands over the secret until all ranks have
// met.
func (e *Env) torchSecret(o MeetOptions, m *Place) (word string, err error) {
	switch {
	case !o.Secret.IsZero():
		m.Secret = o.Secret
		return wordPrint + fingerprint(m.Secret), nil
	case !e.OneHost():
		return wordNone, nil
	}
	name := newHandoverName()
	s, text := secret.New()
	stop, err := handOver(name, text, o.Log)
	if err != nil {
		return "", err
	}
	m.removeWhenMet(stop)
	m.Secret = o.encrypted(s)
	return wordSocket + name, nil
}
