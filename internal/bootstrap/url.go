package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/netif"
	"github.com/gohvd/gohvd/internal/outfile"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/store"
	"github.com/gohvd/gohvd/store/c10d"
)

// MethodOptions holds the inputs of an init method other than its URL.
type MethodOptions struct {
	// Rank and Size are the rank of this process and the size of the job. They are -1 if they must come from
	// the URL or the environment.
	Rank, Size int
	// Getenv returns the value of an environment variable, like os.Getenv.
	Getenv func(name string) string
	// Secret is the secret of the job, which gohvd's own stores require of their clients. If it is zero, a
	// method makes one, unless Insecure is set, if the ranks can share it with no other user.
	Secret   secret.Secret
	Insecure bool
	// Encrypt says whether connections are encrypted if the method makes the secret
	// (secret.Secret.Encrypted).
	Encrypt bool
	// Log is the log of a server that the method starts. It may be nil.
	Log *zap.Logger
}

// Method is a function that opens the store to which the URL u refers. If rank and size are known, the query
// of u contains them as the parameters rank and world_size.
type Method func(ctx context.Context, u *url.URL, o MethodOptions) (*Place, error)

// Methods maps the scheme of a URL to the init method for such URLs.
type Methods map[string]Method

// NewMethods returns the built-in methods, which are the same as PyTorch's:
//
//	env://                                   like tcp://, with MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE
//	tcp://host:port?rank=R&world_size=N      rank 0 serves a store at this address, the others are its clients
//	file:///path?rank=R&world_size=N         a file that all ranks can access and that does not exist yet
//
// If env:// is used and TORCHELASTIC_USE_AGENT_STORE is True, torchrun serves the store at MASTER_ADDR, and
// no rank does. Callers may add methods.
func NewMethods() Methods { return Methods{"env": envMethod, "tcp": tcpMethod, "file": fileMethod} }

// MethodError reports that Methods.Open cannot use the init method of a URL.
type MethodError struct {
	Scheme string // scheme of the URL; empty if the URL has none
	Err    error
}

func (e *MethodError) Error() string {
	if e.Scheme == "" {
		return fmt.Sprintf("init method: %v", e.Err)
	}
	return fmt.Sprintf("init method %s://: %v", e.Scheme, e.Err)
}

func (e *MethodError) Unwrap() error { return e.Err }

// Open opens the store of a job with the init method for the scheme of the URL.
func (m Methods) Open(ctx context.Context, rawURL string, o MethodOptions) (*Place, error) {
	u, err := url.Parse(rawURL)
	if err != nil {
		return nil, &MethodError{Err: err}
	}
	fail := func(err error) (*Place, error) { return nil, &MethodError{u.Scheme, err} }
	method := m[u.Scheme]
	if method == nil {
		return fail(fmt.Errorf("no handler for %q, want one of the schemes %s", rawURL,
			strings.Join(slices.Sorted(maps.Keys(m)), ", ")))
	}
	q, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return fail(err)
	}
	if o.Rank >= 0 || o.Size >= 0 {
		if q.Has("rank") || q.Has("world_size") {
			return fail(fmt.Errorf("rank or world size is given twice, in the URL %q and as an option or setting: remove one of them", rawURL))
		}
		if o.Rank >= 0 {
			q.Set("rank", strconv.Itoa(o.Rank))
		}
		if o.Size >= 0 {
			q.Set("world_size", strconv.Itoa(o.Size))
		}
		u.RawQuery = q.Encode()
	}
	if o.Log == nil {
		o.Log = zap.NewNop()
	}
	p, err := method(ctx, u, o)
	if err != nil {
		return fail(err)
	}
	return p, nil
}

// placeOf reads rank and size from the parameters rank and world_size of a query.
func placeOf(q url.Values) (rank, size int, err error) {
	number := func(name, what string) int {
		text := q.Get(name)
		if text == "" {
			err = errors.Join(err, fmt.Errorf("the URL has no parameter %s, as in ?rank=R&world_size=N", name))
			return 0
		}
		n, convErr := strconv.Atoi(text)
		if convErr != nil {
			err = errors.Join(err, fmt.Errorf("%s is %q, want a number", what, text))
		}
		return n
	}
	rank, size = number("rank", "rank"), number("world_size", "world size")
	switch {
	case err != nil:
	case size < 1:
		err = fmt.Errorf("world size is %d, want at least 1", size)
	case rank < 0 || rank >= size:
		err = fmt.Errorf("rank is %d, want 0 to %d", rank, size-1)
	}
	return rank, size, err
}

func tcpMethod(ctx context.Context, u *url.URL, o MethodOptions) (*Place, error) {
	if u.Port() == "" {
		return nil, errors.New("the URL has no port number")
	}
	rank, size, err := placeOf(u.Query())
	if err != nil {
		return nil, err
	}
	return meetAt(ctx, u.Host, rank, size, o)
}

// New returns the place of a rank in a store that has no network address. Closing the Place closes s.
func New(s store.Store, rank, size int) *Place {
	p := placeAt(s, rank, size, "")
	p.NoAddr = true
	return p
}

// placeAt returns the place of a rank that reaches the store s at addr. Closing the Place closes s.
func placeAt(s store.Store, rank, size int, addr string) *Place {
	p := &Place{Store: s, Rank: rank, Size: size, Addr: addr}
	p.onClose(s.Close)
	return p
}

// meetAt meets at addr. If rank is 0, it serves a store there. Otherwise it connects to this store. If addr
// is on loopback and the user has given no secret, rank 0 makes one for the processes of its user.
func meetAt(ctx context.Context, addr string, rank, size int, o MethodOptions) (p *Place, err error) {
	makes := o.Secret.IsZero() && !o.Insecure && netif.IsLoopback(addr)
	if rank > 0 {
		var client *store.Client
		for {
			asked := o.Secret
			if makes {
				o.Secret, err = AskSecret(ctx, addr)
			}
			if err == nil {
				client, err = store.Dial(ctx, addr, store.Config{Secret: o.Secret})
			}
			// The store of an earlier program may have ended after it has handed over its secret.
			if !makes || !errors.Is(err, secret.ErrWrong) ||
				!asked.IsZero() && fingerprint(asked) == fingerprint(o.Secret) {
				break
			}
		}
		if err != nil {
			return nil, fmt.Errorf("connecting to the store of rank 0: %w", err)
		}
		p = placeAt(client, rank, size, addr)
		p.Reused = true
	} else {
		p = &Place{Rank: rank, Size: size}
		if makes {
			var text string
			o.Secret, text = secret.New()
			stop, err := OfferSecret(addr, text, o.Log)
			if err != nil {
				return nil, err
			}
			p.onClose(stop)
		}
		_, err := p.serve(addr, store.NewHashStore(store.Limits{}),
			store.Config{Secret: o.Secret, Log: o.Log})
		if err != nil {
			if errors.Is(err, syscall.EADDRINUSE) {
				err = fmt.Errorf("%w: the store of gohvd needs a port that init_process_group and other jobs do not use", err)
			}
			return nil, errors.Join(err, p.Close())
		}
	}
	if makes {
		p.Secret = o.made(o.Secret)
	}
	return p, nil
}

// made returns s, a secret that a method has made. If Encrypt is set, it encrypts connections.
func (o *MethodOptions) made(s secret.Secret) secret.Secret {
	if o.Encrypt {
		return s.Encrypted()
	}
	return s
}

func envMethod(ctx context.Context, u *url.URL, o MethodOptions) (*Place, error) {
	q := u.Query()
	var err error
	need := func(name string) string {
		value := o.Getenv(name)
		if value == "" {
			err = errors.Join(err, fmt.Errorf("the environment variable %s is not set", name))
		}
		return value
	}
	for parameter, variable := range map[string]string{"rank": "RANK", "world_size": "WORLD_SIZE"} {
		if !q.Has(parameter) {
			q.Set(parameter, need(variable))
		}
	}
	addr := net.JoinHostPort(need("MASTER_ADDR"), need("MASTER_PORT"))
	if err != nil {
		return nil, err
	}
	rank, size, err := placeOf(q)
	if err != nil {
		return nil, err
	}
	if o.Getenv("TORCHELASTIC_USE_AGENT_STORE") != "True" {
		return meetAt(ctx, addr, rank, size, o)
	}
	s, err := c10d.Dial(ctx, addr, c10d.Unknown)
	if err != nil {
		return nil, err
	}
	return placeAt(s, rank, size, addr), nil
}

// fileSecretKey is the key of the secret in a file that only one user can read.
const fileSecretKey = "gohvd/secret"

func fileMethod(ctx context.Context, u *url.URL, o MethodOptions) (*Place, error) {
	if u.Path == "" {
		return nil, errors.New("the URL has no path")
	}
	rank, size, err := placeOf(u.Query())
	if err != nil {
		return nil, err
	}
	if u.Host != "" {
		return nil, fmt.Errorf("%q is not a path of this host: want three slashes before the path, as in file:///PATH",
			u.Host+u.Path)
	}
	s, err := store.NewFileStore(ctx, u.Path, size)
	if err != nil {
		return nil, err
	}
	p := New(s, rank, size)
	if o.Secret.IsZero() && !o.Insecure {
		if p.Secret, err = secretInFile(ctx, s); err != nil {
			return nil, errors.Join(err, p.Close())
		}
		p.Secret = o.made(p.Secret)
	}
	return p, nil
}

// secretInFile returns the secret in the file of s, and makes one if there is none. If other users may read
// the file, it returns the zero Secret.
func secretInFile(ctx context.Context, s *store.FileStore) (secret.Secret, error) {
	path, err := outfile.Resolve(s.Path())
	if err != nil {
		return secret.Secret{}, err
	}
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return secret.Secret{}, fmt.Errorf("stat %s: %w", s.Path(), err)
	}
	switch {
	case int(st.Uid) != os.Geteuid():
		return secret.Secret{}, fmt.Errorf("%s belongs to user %d, want user %d: give all ranks the same file in "+
			"HVD_SECRET_FILE, or set HVD_INSECURE=1 to accept every user of this host", s.Path(), st.Uid, os.Geteuid())
	case st.Mode&unix.S_IFMT != unix.S_IFREG || st.Mode&0o077 != 0:
		return secret.Secret{}, nil
	}
	_, text := secret.New()
	actual, _, err := s.CompareAndSet(ctx, fileSecretKey, nil, []byte(text))
	if err != nil {
		return secret.Secret{}, err
	}
	return secret.Parse(string(actual))
}
