/* objects.c -- see objects.h. */
#include "objects.h"
#include <structmember.h>

enum { POOLED = 512 };      /* as in shmcache/_attachment.py */

/* ---- Part: where the bytes of one object lie --------------------------------------------------- */

#define FIELD(name, type) {#name, type, offsetof(part_object, part) + offsetof(shmc_part, name), 0, NULL}
static PyMemberDef part_members[] = {
    FIELD(offset, T_ULONGLONG), FIELD(size, T_ULONGLONG), FIELD(extent, T_ULONGLONG), FIELD(block, T_UINT),
    FIELD(gen, T_UINT), FIELD(meta_len, T_UINT), FIELD(published, T_UINT), {NULL, 0, 0, 0, NULL},
};

static PyObject *part_meta(PyObject *self, void *unused)
{
    (void)unused;
    const shmc_part *p = &((part_object *)self)->part;
    return PyBytes_FromStringAndSize((const char *)p->meta, p->meta_len <= SHMC_META_MAX ? p->meta_len : 0);
}

static PyObject *part_address(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromVoidPtr(&((part_object *)self)->part);
}

static PyGetSetDef part_getset[] = {
    {"meta", part_meta, NULL, NULL, NULL}, {"address", part_address, NULL, NULL, NULL}, {NULL, NULL, NULL, NULL, NULL},
};

static void part_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyType_Slot part_slots[] = {{Py_tp_members, part_members}, {Py_tp_getset, part_getset}, {Py_tp_dealloc, (void *)part_dealloc}, {0, NULL}};
static PyType_Spec part_spec = {"shmcache._shmfast.Part", sizeof(part_object), 0, Py_TPFLAGS_DEFAULT, part_slots};

/* ---- Held: what `shmcache._block.Block` is made of ----------------------------------------------- */

#define SLOT(name) {"_" #name, T_OBJECT_EX, offsetof(held_object, name), 0, NULL}
static PyMemberDef held_members[] = {
    SLOT(attachment), SLOT(namespace), SLOT(holds), SLOT(part), SLOT(layout), SLOT(more), {NULL, 0, 0, 0, NULL},
};

static int held_traverse(PyObject *self, visitproc visit, void *arg)
{
    held_object *o = (held_object *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(o->attachment);
    Py_VISIT(o->namespace);
    Py_VISIT(o->holds);
    Py_VISIT(o->part);
    Py_VISIT(o->layout);
    Py_VISIT(o->more);
    return 0;
}

static int held_clear(PyObject *self)
{
    held_object *o = (held_object *)self;
    Py_CLEAR(o->holds);
    Py_CLEAR(o->more);
    Py_CLEAR(o->part);
    Py_CLEAR(o->layout);
    Py_CLEAR(o->namespace);
    Py_CLEAR(o->attachment);
    return 0;
}

static void held_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    held_clear(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* Attributes of an attachment and methods of an object and a list: interned, immutable, for all interpreters. */
static PyObject *name_holds, *name_pop, *name_release_slowly, *name_count_down_slowly, *name_not_released, *name_not_counted_down;

static int names(void)
{
    return (name_holds = PyUnicode_InternFromString("holds")) && (name_pop = PyUnicode_InternFromString("pop")) &&
           (name_release_slowly = PyUnicode_InternFromString("_release")) && (name_count_down_slowly = PyUnicode_InternFromString("_count_down")) &&
           (name_not_released = PyUnicode_InternFromString("_not_released")) && (name_not_counted_down = PyUnicode_InternFromString("_not_counted_down"));
}

/* A hold without its reference is for the next call, as in Attachment.empty_holds. */
static int pool(PyObject *attachment, PyObject *hold)
{
    PyObject *list = PyObject_GetAttr(attachment, name_holds);
    if (!list) return -1;
    int rc = PyList_Size(list) < POOLED ? PyList_Append(list, hold) : 0;
    Py_DECREF(list);
    return rc;
}

shmc_owner *owner_of(PyObject *hold)
{
    PyObject *at = PyTuple_GetItem(hold, 1);
    return at ? PyLong_AsVoidPtr(at) : NULL;
}

/* Give back the last hold of an object that is like most; `failed` is its method that takes a status, `slowly`
 * the one for all others. From the moment the hold is off the list it is in `hold`, whose owner gives back
 * by itself what it still has. */
static PyObject *give_back(PyObject *self, Py_ssize_t most, PyObject *failed, PyObject *slowly)
{
    held_object *o = (held_object *)self;
    Py_ssize_t n = o->holds ? PyList_Size(o->holds) : 0;
    if (n < 1 || n > most || !o->h || o->more != Py_None) return PyObject_CallMethodObjArgs(self, slowly, NULL);
    PyObject *hold = PyObject_CallMethodObjArgs(o->holds, name_pop, NULL);
    if (!hold) return NULL;                 /* without a GIL, another thread may be first: IndexError */
    shmc_owner *owner = owner_of(hold);
    PyObject *out = NULL;
    int rc;
    Py_BEGIN_ALLOW_THREADS
    rc = shmc_release(o->h, &owner, 1);
    Py_END_ALLOW_THREADS
    if (rc >= 0) {
        if (!pool(o->attachment, hold)) { out = Py_None; Py_INCREF(out); }
    } else if (!PyList_Append(o->holds, hold)) {
        PyObject *status = PyLong_FromLong(rc);
        if (status) out = PyObject_CallMethodObjArgs(self, failed, status, NULL);
        Py_XDECREF(status);
    }
    Py_DECREF(hold);
    return out;
}

static PyObject *held_count_down(PyObject *self, PyObject *unused)
{
    (void)unused;
    return give_back(self, PY_SSIZE_T_MAX, name_not_counted_down, name_count_down_slowly);
}

static PyObject *held_release(PyObject *self, PyObject *args, PyObject *kwargs)
{
    PyObject *after = Py_None;
    static char *keywords[] = {"after", NULL};
    if ((PyTuple_Size(args) || kwargs) && !PyArg_ParseTupleAndKeywords(args, kwargs, "|O:release", keywords, &after)) return NULL;
    if (after != Py_None) return PyObject_CallMethodObjArgs(self, name_release_slowly, after, NULL);
    return give_back(self, 1, name_not_released, name_release_slowly);
}

static PyMethodDef held_methods[] = {
    {"ref_count_down", held_count_down, METH_NOARGS, PyDoc_STR(
        "ref_count_down($self, /)\n--\n\n"
        "Give back one reference of this object; StaleHandleError when it has none.")},
    {"release", (PyCFunction)(void (*)(void))held_release, METH_VARARGS | METH_KEYWORDS, PyDoc_STR(
        "release($self, after=None)\n--\n\n"
        "Give back all that this object still holds, pins too. Doing it again does nothing.\n\n"
        "Parameters\n----------\nafter\n"
        "    anything with `query()`, such as a `torch.cuda.Event`: the holds are kept until it is\n"
        "    true. The object counts as released at once.\n\n"
        "Raises\n------\nStaleHandleError\n    in a forked child: the holds are the parent's.\n"
        "LockTimeoutError\n    nothing changed; try again.\n")},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot held_slots[] = {
    {Py_tp_methods, held_methods},
    {Py_tp_members, held_members}, {Py_tp_traverse, (void *)held_traverse}, {Py_tp_clear, (void *)held_clear},
    {Py_tp_dealloc, (void *)held_dealloc}, {0, NULL},
};
static PyType_Spec held_spec = {"shmcache._shmfast.Held", sizeof(held_object), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, held_slots};

held_object *object_new(PyObject *module, shmc *h, PyObject *const *of, PyObject *hold, part_object **part)
{
    struct state *s = PyModule_GetState(module);
    if (!hold) return NULL;
    if (!PyType_Check(of[CLASS]) || !PyType_IsSubtype((PyTypeObject *)of[CLASS], s->held)) {
        PyErr_SetString(PyExc_TypeError, "the class of an object is one below Held");
        return NULL;
    }
    held_object *o = (held_object *)PyType_GenericAlloc((PyTypeObject *)of[CLASS], 0);
    if (!o) return NULL;
    o->h = h;
    *part = PyObject_New(part_object, s->part);
    o->part = (PyObject *)*part;
    o->holds = PyList_New(1);
    if (!o->part || !o->holds) { Py_DECREF(o); return NULL; }
    (*part)->part.published = 0;
    Py_INCREF(hold);
    PyList_SetItem(o->holds, 0, hold);
    Py_INCREF(of[ATTACHMENT]);
    o->attachment = of[ATTACHMENT];
    Py_INCREF(of[NAMESPACE]);
    o->namespace = of[NAMESPACE];
    Py_INCREF(of[LAYOUT]);
    o->layout = of[LAYOUT];
    Py_INCREF(Py_None);
    o->more = Py_None;
    return o;
}

int objects_ready(PyObject *module)
{
    struct state *s = PyModule_GetState(module);
    if (!names()) return -1;
    s->part = (PyTypeObject *)PyType_FromSpec(&part_spec);
    if (!s->part || PyModule_AddObjectRef(module, "Part", (PyObject *)s->part)) return -1;
    s->held = (PyTypeObject *)PyType_FromSpec(&held_spec);
    return !s->held || PyModule_AddObjectRef(module, "Held", (PyObject *)s->held) ? -1 : 0;
}
