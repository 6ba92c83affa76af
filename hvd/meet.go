package hvd

import (
	"context"
	"fmt"
	"net/url"

	"github.com/gohvd/gohvd/internal/netif"
	"github.com/gohvd/gohvd/internal/place"
	"github.com/gohvd/gohvd/store"
)

// WithStore makes the ranks meet in s instead of the launcher's store. HOROVOD_RANK and HOROVOD_SIZE say which ranks they are.
// They listen on loopback, unless HOROVOD_GLOO_IFACE chooses an interface. The caller keeps and closes s, after the shutdown.
func WithStore(s store.Store) InitOption { return func(o *initOptions) { o.Store = s } }

// WithInitMethod makes the ranks meet as PyTorch's init_process_group does by a URL:
//
//	env://                                   what MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE say
//	tcp://host:port?rank=R&world_size=N      a store that rank 0 serves there
//	file:///path?rank=R&world_size=N         a file that all ranks see and that is not there before
//
// Rank and size may be left out of the URL if a launcher, or HOROVOD_RANK and HOROVOD_SIZE, say them. The setting
// HVD_INIT_METHOD does the same for a program that gives no way to meet. If the ranks are on several hosts they
// need a secret, in HVD_SECRET_FILE, and with a file an interface, in HOROVOD_GLOO_IFACE.
func WithInitMethod(url string) InitOption { return func(o *initOptions) { o.Method = url } }

// InitMethod opens the store at which the ranks of a job meet, for a URL with a scheme of the program's own. The query of u has rank and
// world_size if a launcher or the settings say them; rank and size are this process's place in the job. The store is closed when the
// rank shuts down, or when its Init fails.
type InitMethod func(ctx context.Context, u *url.URL) (s store.Store, rank, size int, err error)

// WithInitScheme makes open the init method of URLs that begin with scheme://, in WithInitMethod and in the setting HVD_INIT_METHOD. The
// ranks listen on loopback, unless HOROVOD_GLOO_IFACE chooses an interface.
func WithInitScheme(scheme string, open InitMethod) InitOption {
	return func(o *initOptions) {
		if o.Methods == nil {
			o.Methods = make(place.Methods)
		}
		o.Methods[scheme] = func(ctx context.Context, u *url.URL, _ place.MethodOptions) (*place.Place, error) {
			s, rank, size, err := open(ctx, u)
			if err != nil {
				return nil, err
			}
			return place.New(s, rank, size), nil
		}
	}
}

// UniqueID says where the ranks of one job meet, and is the key to it: 128 bytes that one process makes by NewUniqueID and hands
// to the others by any means. Anybody who has it can join the job, so keep it as a secret. String is its text, and
// ParseUniqueID reads that. It is good for one Init of all ranks.
type UniqueID [128]byte

// String is the text of id, 171 letters, digits, '-' and '_'.
func (id UniqueID) String() string { return place.ID(id).String() }

// ParseUniqueID reads the text of an id, which String made. Its error does not show the text.
func ParseUniqueID(text string) (UniqueID, error) {
	id, err := place.ParseID(text)
	return UniqueID(id), err
}

// NewUniqueID makes an id, on the model of ncclGetUniqueId. The process that calls it, a rank or not, answers the ranks until
// all have met and some 30 s longer, or until ctx ends, and so has to live as long. It listens on the interface of
// HOROVOD_GLOO_IFACE if that is set, else on that of the default route, else on loopback.
func NewUniqueID(ctx context.Context, opts ...InitOption) (UniqueID, error) {
	o := collect(opts)
	cfg, err := o.Read()
	if err != nil {
		return UniqueID{}, fmt.Errorf("hvd: new unique id: %w", err)
	}
	choice, err := netif.Parse(cfg.NetworkInterfaces)
	if err != nil {
		return UniqueID{}, fmt.Errorf("hvd: new unique id: %w", err)
	}
	listen, err := choice.Any()
	if err != nil {
		return UniqueID{}, fmt.Errorf("hvd: new unique id: %w", err)
	}
	id, _, err := place.NewID(ctx, listen.String(), cfg.TLS, o.Log)
	if err != nil {
		return UniqueID{}, fmt.Errorf("hvd: new unique id: %w", err)
	}
	return UniqueID(id), nil
}

// InitWithID is Init for a rank of a job of size ranks that have the same id. Contradictions between them (two sizes, a rank
// twice, a device twice) are errors at all of them. After a Shutdown the ranks need a new id.
func InitWithID(ctx context.Context, id UniqueID, rank, size int, opts ...InitOption) error {
	return Init(ctx, append(opts[:len(opts):len(opts)], WithID(rank, size, id))...)
}

// WithID makes the ranks meet by ids, the same at all of them in the same order: one, or for more than some thousand ranks
// several, which NewUniqueID made in different processes, whose connections the ranks then share. The setting HVD_UNIQUE_ID does the same for a
// program that gives no way to meet.
func WithID(rank, size int, ids ...UniqueID) InitOption {
	return func(o *initOptions) {
		o.ID = &place.ByID{Rank: rank, Size: size}
		for _, id := range ids {
			o.ID.IDs = append(o.ID.IDs, place.ID(id))
		}
	}
}

// WithDevice names the accelerator that this rank uses, by a name that is unique on its host, such as its UUID. Two ranks of a host
// that have the same device are an error at all ranks, unless both share it.
func WithDevice(name string, share bool) InitOption {
	return func(o *initOptions) { o.Device, o.SharesDevice = name, share }
}

// keeping keeps a meeting that cannot be repeated.
func keeping(met **place.Meeting) InitOption { return func(o *initOptions) { o.Kept = met } }
